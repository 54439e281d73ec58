"""``torch.distributed.checkpoint`` with lazy saves that are committed on all ranks at once, and fast loads.

::

    from datastates.integrations.dcp import DataStatesReader, DataStatesWriter
"""

from datastates.integrations.dcp_reader import DataStatesReader, ReadReport, newest_checkpoint
from datastates.integrations.dcp_writer import DataStatesWriter

__all__ = ["DataStatesReader", "DataStatesWriter", "ReadReport", "newest_checkpoint"]
