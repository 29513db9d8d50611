"""The soak's line through samples is the line."""

import pytest

from tests.soak.memory import slope


def test_the_slope_of_a_line_is_found_and_noise_that_cancels_changes_nothing():
    assert slope([(x, 3.0 * x + 7.0) for x in range(10)]) == pytest.approx(3.0)
    assert slope([(x, 5.0 + (1 if x in (0, 9) else 0)) for x in range(10)]) == pytest.approx(0.0)
