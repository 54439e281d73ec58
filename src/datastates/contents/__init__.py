"""What a file holds, read without torch and without running anything that it says."""
