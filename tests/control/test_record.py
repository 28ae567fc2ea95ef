"""What the controller believes of a text, and of the price of an arm, from rounds made up one by one."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from outrider.control import Adaptive, Costs, Load, RoundStats
from outrider.control.adaptive import _Timed
from outrider.control.record import Record
from outrider.core import Arm, Drafts

ARMS = [Arm("a", 32), Arm("b", 32)]
CHAIN = [-1, 0, 1, 2]


def tell(record: Record, key: Hashable, arm: int, accepted: int) -> None:
    """A chain of four, of which so many came true."""
    record.now += 1
    record.expect(key, arm, 4, CHAIN, [0.7, 0.5, 0.35, 0.25])
    record.learn(key, range(accepted))
    record.think()


def experienced() -> Record:
    """Both arms were seen on many texts, and did alike."""
    record = Record(ARMS)
    for text in range(24):
        for _ in range(2):
            tell(record, text, 0, text % 5)
            tell(record, text, 1, text % 5)
    return record


def expected(record: Record, key: Hashable, arm: int) -> float:
    """Tokens from a chain of four."""
    return float(record.curves(key)[arm][3])


def cheap(row: float = 0.0) -> Costs:
    """Forwards whose further rows cost so much, and proposals that cost little."""
    costs = Costs()
    for rows in range(1, 34):
        costs.observe_forward(rows, 100, 0.005 + row * rows)
    for length in range(1, 33):
        costs.observe_proposal("a", 1, length, 0.0001 * length)
    return costs


def test_an_arm_that_was_not_tried_shares_the_ease_of_those_that_were() -> None:
    record = experienced()
    usual = expected(record, "new", 1)
    for _ in range(12):
        tell(record, "hard", 0, 0)
        tell(record, "easy", 0, 4)
    assert expected(record, "hard", 0) < expected(record, "hard", 1) < 0.85 * usual  # or whatever is untried would be asked next
    assert usual < expected(record, "easy", 1) < expected(record, "easy", 0)
    assert abs(expected(record, "new", 1) - usual) < 0.3 * usual  # of one text, not of all


def test_bad_luck_leaves_hope_until_it_has_lasted() -> None:
    record = Record(ARMS)
    hopes, curves = [], []
    for _ in range(20):
        tell(record, "text", 0, 0)
        hopes.append(record.hopes("other")[0])
        curves.append(expected(record, "other", 0))
    beyond = [own[3] - curve for own, curve in zip(hopes, curves, strict=True) if own]
    assert len(beyond) == 15
    assert beyond[0] > beyond[3] > 0.3
    assert beyond[3] > beyond[-1] > 0.1
    assert record.hopes("other")[1][3] == 4.0  # nothing is known of it


def test_an_arm_tried_long_ago_is_believed_as_little_as_one_never_tried() -> None:
    record = experienced()
    for _ in range(8):
        tell(record, "turned", 1, 4)
    before = expected(record, "turned", 1)
    for _ in range(40):
        tell(record, "turned", 0, 0)
    assert expected(record, "turned", 1) < 0.7 * before


def test_a_new_kind_of_request_expects_what_less_free_ones_got() -> None:
    """Who expects too little never tries: a kind must not begin as a freer one did, however near that is."""
    record = Record(ARMS)
    record.meet(["cold", "hot", "warm", "warmer"], [0, 15, 8, 20])
    for _ in range(40):
        tell(record, "cold", 0, 4)
        tell(record, "hot", 0, 0)
    record.forget("cold")
    assert expected(record, "warm", 0) > 3.0
    assert expected(record, "warmer", 0) < 1.0
    record = Record(ARMS)
    record.meet(["hot", "cold"], [15, 0])
    untold = expected(record, "unmet", 0)
    for _ in range(40):
        tell(record, "hot", 0, 0)
    assert expected(record, "cold", 0) == untold


def test_nodes_that_a_drafter_does_not_give_are_not_paid_for() -> None:
    record = Record(ARMS)
    assert record.nodes("new", 0)[3] == 4.0
    for count in [1, 1, 3, 3] * 16:
        record.now += 1
        record.expect("text", 0, 4, CHAIN[:count], [0.7, 0.5, 0.35][:count])
        record.learn("text", [])
        record.think()
    assert record.nodes("other", 0)[:4] == pytest.approx([1.0, 1.5, 2.0, 2.0], abs=0.1)
    assert record.nodes("other", 0)[8] < 8.0  # twelve were never asked for
    assert record.nodes("other", 1)[3] == 4.0
    kept = Record(ARMS)
    kept.restore(record.as_dict())
    assert abs(kept.nodes("other", 0)[3] - record.nodes("other", 0)[3]) < 1e-3


def test_drafts_may_stop_where_a_node_costs_more_than_it_brings() -> None:
    def floor(row: float) -> float:
        return Adaptive(ARMS[:1], cheap(row)).plan(Load([40], [0], 1, 100, 1)).floor

    assert 0.0 < floor(0.0) < floor(0.0002) < floor(0.0004) < 0.7


@pytest.mark.parametrize(("left", "drafts"), [(40, False), (4000, True)])
def test_what_takes_long_to_begin_is_not_begun_for_a_short_text(left: int, drafts: bool) -> None:
    policy = Adaptive(ARMS[:1], cheap())
    slow = RoundStats([4], [()], 5, 2.0, 0.005)
    for _ in range(8):
        policy._enter(_Timed(slow, 100, 1, [("a", 1, 4)], began=True, newcomers=1))
    assert any(policy.plan(Load([left], [0], 1, 100, 1)).lengths) == drafts


def test_catching_up_never_raises_the_price_of_an_arm() -> None:
    """A sequence's first proposal by an arm reads all that came before: that costs once, the next one does not."""
    policy = Adaptive(ARMS[:1], cheap())

    def draft(key: int, factor: float) -> tuple[float, float]:
        """The price before and after a proposal that took so many times as long as it should."""
        load = Load([40], [key], 1, 100, 1)
        plan = policy.plan(load)
        (length,) = plan.lengths
        assert length, "the arm is worth using here"
        price = policy.costs.proposal("a", 1, length)
        drafts = policy.select(Drafts.chains([[1] * length], survival=[[0.9**i for i in range(1, length + 1)]]), load)
        (count,) = drafts.counts
        policy.observe(RoundStats([count], [range(count)], 1 + count, price * factor, 0.005))
        policy._think()  # costs are entered when a plan is made
        return price, policy.costs.proposal("a", 1, length)

    for key in range(30):
        before, after = draft(key, 20.0)
        assert after <= before
