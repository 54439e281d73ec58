"""Swap files have the same names in the checkpoint, whatever else the process has made."""

from __future__ import annotations

import pytest

from datastates.integrations.nvme import _stable_name


@pytest.mark.parametrize(
    ("name", "first", "expected"),
    [
        ("0_3.tensor.swp", 0, "0_3.tensor.swp"),
        ("12_15.tensor.swp", 12, "0_3.tensor.swp"),
        ("exp_avg-12_15.tensor.swp", 10, "exp_avg-2_5.tensor.swp"),
        ("exp_avg_sq-112_115.tensor.swp", 12, "exp_avg_sq-100_103.tensor.swp"),
        ("momentum-2_buffer-7_7.tensor.swp", 7, "momentum-2_buffer-0_0.tensor.swp"),
        ("unknown.swp", 7, "unknown.swp"),
    ],
)
def test_names_count_from_the_first_parameter_of_the_model(name, first, expected):
    assert _stable_name(name, first) == expected
