"""A few hundred fresh problems of fuzz.py in every run; the command runs as many as asked for."""
import pytest
from fuzz import try_problem


@pytest.mark.parametrize("part", range(10))
def test_fuzz(part, seed):
    failures = [failure for i in range(20) if (failure := try_problem(seed + 100 * part + i))]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("number", [220, 230, 543, 1415, 1527, 1741])
def test_problems_that_failed_once(number):
    assert not (failure := try_problem(number)), failure
