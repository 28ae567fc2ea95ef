"""The router goes where a request's KV is and never far above the least loaded; the number of replicas follows the load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.routing import (
    ReplicaLoad,
    RequestKeys,
    Router,
    RouterOptions,
    Scaling,
    ScalingRule,
    desired_replicas,
    text_prefix,
    token_prefix,
    wanted_replicas,
)

IDLE = {name: ReplicaLoad(0, 0, 8) for name in "abc"}
NAMES = st.sampled_from([None, "x", "y", "z"])
KEYS = st.builds(RequestKeys, NAMES, NAMES, st.lists(st.integers(0, 5), max_size=3).map(lambda ids: token_prefix(ids, block=1)))
LOADS = st.dictionaries(
    st.sampled_from("abcd"), st.builds(ReplicaLoad, st.integers(0, 9), st.integers(0, 9), st.just(8)), min_size=1
)


def sent(router: Router, keys: RequestKeys, loads: dict[str, ReplicaLoad] = IDLE, now: float = 0.0) -> str:
    replica = router.choose(keys, loads, now)
    router.sent(replica, keys)
    return replica


def busy(name: str, share: float) -> dict[str, ReplicaLoad]:
    return IDLE | {name: ReplicaLoad(round(8 * share), 0, 8)}


@given(st.lists(st.tuples(KEYS, LOADS, st.booleans()), max_size=30))
def test_a_choice_is_one_of_the_replicas_near_the_least_loaded_and_is_repeatable(
    requests: list[tuple[RequestKeys, dict[str, ReplicaLoad], bool]],
) -> None:
    one, other = (Router(RouterOptions(keys=8)) for _ in range(2))
    for now, (keys, loads, ends) in enumerate(requests):
        replica = sent(one, keys, loads, now)
        assert sent(other, keys, dict(reversed(loads.items())), now) == replica
        assert loads[replica].share <= min(load.share for load in loads.values()) + one.options.spill
        assert len(one) <= 8
        if ends:
            one.gone(replica)
            other.gone(replica)


@given(KEYS, st.sampled_from("abc"))
def test_what_a_replica_had_is_sent_there_again(keys: RequestKeys, replica: str) -> None:
    router = Router()
    router.sent(replica, keys)
    known = keys.conversation is not None or keys.prefix or keys.tenant is not None
    assert not known or router.choose(keys, IDLE, 1.0) == replica
    router.gone(replica)
    assert len(router) == 0
    assert router.choose(keys, IDLE, 1.0) == Router().choose(keys, IDLE, 1.0)


def test_conversation_goes_before_prefix_and_prefix_before_tenant() -> None:
    router, prefix = Router(), token_prefix([1, 2, 3], block=1)
    router.sent("a", RequestKeys(tenant="t"))
    assert router.choose(RequestKeys("c", "t", prefix), IDLE, 0) == "a"
    router.sent("b", RequestKeys(prefix=prefix[:2]))
    assert router.choose(RequestKeys("c", "t", prefix), IDLE, 0) == "b"
    router.sent("a", RequestKeys(prefix=prefix))
    assert router.choose(RequestKeys("c", "t", prefix), IDLE, 0) == "a", "the longest known prefix"
    router.sent("c", RequestKeys("c"))
    assert router.choose(RequestKeys("c", "t", prefix), IDLE, 0) == "c"


@pytest.mark.parametrize(("longer", "shorter"), ["ab", "ba", "ac", "ca"])
def test_the_longest_known_prefix_decides_whoever_holds_it(longer: str, shorter: str) -> None:
    router, prefix = Router(), token_prefix([1, 2, 3], block=1)
    router.sent(longer, RequestKeys(prefix=prefix))
    router.sent(shorter, RequestKeys(prefix=prefix[:2]))
    assert router.choose(RequestKeys(prefix=prefix), IDLE, 0) == longer


def test_a_conversation_follows_its_last_turn() -> None:
    router = Router()
    for replica in "ab":
        router.sent(replica, RequestKeys("c"))
    assert router.choose(RequestKeys("c"), IDLE, 0) == "b"
    assert router.choose(RequestKeys("c"), busy("b", 0.5), 0) == "a", "the latest of those that are not overloaded"


def test_an_overloaded_replica_is_passed_over_and_one_at_the_threshold_is_not() -> None:
    router, keys = Router(RouterOptions(spill=0.25)), RequestKeys("c")
    router.sent("b", keys)
    assert router.choose(keys, busy("b", 0.25), 0) == "b"
    assert router.choose(keys, busy("b", 0.375), 0) != "b"


def test_requests_with_one_prefix_spread_over_all_replicas_under_load() -> None:
    router, running = Router(), dict.fromkeys("abc", 0)
    keys = RequestKeys(prefix=text_prefix("the same prompt"))
    for _ in range(24):
        running[sent(router, keys, {name: ReplicaLoad(count, 0, 8) for name, count in running.items()})] += 1
    assert sorted(running.values()) == [8, 8, 8]


def test_unknown_requests_spread_evenly_and_alike_in_every_router() -> None:
    keys = [RequestKeys(conversation=str(number)) for number in range(300)]
    choices = [Router().choose(key, IDLE, 0) for key in keys]
    assert all(70 < choices.count(name) < 130 for name in IDLE)
    fewer = {name: IDLE[name] for name in "ab"}
    moved = [Router().choose(key, fewer, 0) for key in keys]
    assert all(new == old for old, new in zip(choices, moved, strict=True) if old != "c"), "only what the lost one had moves"


def test_memory_is_forgotten_with_time() -> None:
    router = Router(RouterOptions(memory_s=10))
    loads = busy("a", 0.25)  # so that nothing unknown goes to it
    router.choose(RequestKeys(), loads, 100.0)
    router.sent("a", RequestKeys("c"))
    assert router.choose(RequestKeys("c"), loads, 110.0) == "a"
    assert router.choose(RequestKeys("c"), loads, 110.5) != "a"


def test_a_prefix_that_everybody_holds_says_nothing() -> None:
    router, keys = Router(), RequestKeys(prefix=(7,))
    loads = {f"r{i}": ReplicaLoad(1, 0, 8) for i in range(70)} | {"new": ReplicaLoad(0, 0, 8)}
    for i in range(70):
        router.sent(f"r{i}", keys)
    assert router.choose(keys, loads, 0) == "new"


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ValueError, match="no replica"):
        Router().choose(RequestKeys(), {}, 0)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.sampled_from(["", "t"]))
def test_prefixes_agree_exactly_where_the_tokens_do(one: list[int], other: list[int], tenant: str) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = token_prefix(one, tenant, 2), token_prefix(other, tenant, 2)
    assert len(left) == len(one) // 2
    assert sum(a == b for a, b in zip(left, right, strict=False)) == same // 2
    assert not set(left) & set(token_prefix(one, tenant + "other", 2))


def test_text_prefixes_are_blocks_of_bytes() -> None:
    assert text_prefix("") == ()
    assert len(text_prefix("short")) == 1 != len(text_prefix("é" * 256))
    assert text_prefix("a" * 600)[:2] == text_prefix("a" * 512 + "b" * 300)[:2]
    assert len(text_prefix("a" * 10**6)) == 128
    text_prefix("\ud800")  # a lone surrogate, as JSON may hold it


@pytest.mark.parametrize(("load", "wanted"), [(0, 1), (5, 1), (6, 2), (11, 2), (12, 3), (1000, 4)])
def test_wanted_replicas_bring_the_load_to_the_target(load: int, wanted: int) -> None:
    assert wanted_replicas(load, 0, 8, ScalingRule(1, 4, target=0.7)) == wanted == wanted_replicas(0, load, 8, ScalingRule(1, 4))


def test_the_number_follows_after_a_delay_without_a_break() -> None:
    rule, scaling = ScalingRule(1, 3, 0.7, up_s=10, down_s=100), Scaling(1)
    numbers = []
    for now, load in ((0, 20), (5, 20), (7, 1), (8, 20), (17, 9), (18, 20), (20, 20), (30, 1), (129, 6), (130, 1), (231, 1)):
        scaling = desired_replicas(load, 0, 8, rule, scaling, float(now))
        numbers.append(scaling.replicas)
    assert numbers == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(("present", "loads", "then"), [(3, (6, 1, 6, 1), 2), (1, (20, 6, 20), 2)], ids=["down", "up"])
def test_of_the_numbers_wanted_meanwhile_the_nearest_counts(present: int, loads: tuple[int, ...], then: int) -> None:
    rule, scaling = ScalingRule(1, 3, 0.7, up_s=2, down_s=3), Scaling(present)
    for now, load in enumerate(loads):
        scaling = desired_replicas(load, 0, 8, rule, scaling, float(now))
    assert scaling.replicas == then


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=40))
def test_the_number_stays_in_bounds_and_moves_only_toward_what_is_wanted(steps: list[tuple[int, int]]) -> None:
    rule, scaling, now = ScalingRule(1, 5, up_s=10, down_s=30), Scaling(1), 0.0
    for load, seconds in steps:
        now += seconds
        before, wanted = scaling.replicas, wanted_replicas(load, 0, 8, rule)
        scaling = desired_replicas(load, 0, 8, rule, scaling, now)
        assert min(before, wanted) <= scaling.replicas <= max(before, wanted)
        assert 1 <= scaling.replicas <= 5


def test_options_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="spill"):
        RouterOptions(spill=-1)
    with pytest.raises(InvalidParameter, match="max_replicas"):
        ScalingRule(3, 2)
    with pytest.raises(InvalidParameter, match="target"):
        ScalingRule(target=0)
