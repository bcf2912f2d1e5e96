from hypothesis import given
from hypothesis import strategies as st

from rose_dist.layers.moe import most_rows


@given(tokens=st.integers(1, 4096), top_k=st.integers(1, 8), experts=st.sampled_from([32, 128, 256]))
def test_an_expert_has_at_least_the_mean_and_at_most_a_row_a_token(tokens: int, top_k: int, experts: int) -> None:
    assert tokens * top_k / experts <= most_rows(tokens, top_k, experts) <= tokens


def test_one_token_gives_an_expert_one_row() -> None:
    assert [most_rows(1, 4, experts) for experts in (32, 128)] == [1, 1]
