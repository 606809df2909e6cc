"""Every pair occurs, in fewer cases than there are combinations."""

from itertools import combinations, product

from pairwise import pairwise


def test_every_pair_of_values_occurs_in_few_cases() -> None:
    parameters = ("abcde", (0, 1), (False, True, None))
    cases = pairwise(*parameters)
    assert cases == pairwise(*parameters) and 15 <= len(cases) <= 18 < len(list(product(*parameters)))
    for (i, first), (k, second) in combinations(enumerate(parameters), 2):
        assert {(case[i], case[k]) for case in cases} == set(product(first, second))
