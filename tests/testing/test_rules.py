from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.testing import FaultRule

ORDER = Envelope({"order_id": 7}, message_type="OrderPlaced")


def fates(rule: FaultRule, number: int = 100) -> list[bool]:
    return [rule.strikes("billing", ORDER) for _ in range(number)]


def test_without_conditions_it_strikes_everybody() -> None:
    rule = FaultRule("fail", "7")

    assert fates(rule, 3) == [True] * 3
    assert rule.struck == 3


@pytest.mark.parametrize(
    ("whom", "strikes"),
    [
        ({"dispatcher": "billing"}, True),
        ({"dispatcher": "mail"}, False),
        ({"message_type": "OrderPlaced"}, True),
        ({"message_type": "OrderShipped"}, False),
        ({"when": lambda envelope: envelope.payload["order_id"] == 7}, True),
        ({"when": lambda envelope: envelope.attempt > 1}, False),
        ({"dispatcher": "billing", "message_type": "OrderShipped"}, False),
        ({"share": 0}, False),
    ],
)
def test_all_conditions_must_fit(whom: Any, strikes: bool) -> None:
    rule = FaultRule("fail", "7", **whom)

    assert rule.strikes("billing", ORDER) is strikes
    assert rule.struck == int(strikes)


def test_it_strikes_so_many_times_and_no_more() -> None:
    assert fates(FaultRule("fail", "7", times=2), 4) == [True, True, False, False]


def test_a_share_is_random_and_the_same_for_the_same_seed() -> None:
    rule = FaultRule("fail", "7", share=0.3)

    first, again, other = (
        fates(rule),
        fates(FaultRule("fail", "7", share=0.3)),
        fates(FaultRule("fail", "8", share=0.3)),
    )

    assert first == again
    assert first != other
    assert 15 <= rule.struck <= 45


def test_those_that_do_not_fit_use_up_no_luck() -> None:
    rule = FaultRule("fail", "7", share=0.5, dispatcher="billing")
    expected = fates(FaultRule("fail", "7", share=0.5))

    found = []
    for _ in range(100):
        rule.strikes("mail", ORDER)
        found.append(rule.strikes("billing", ORDER))

    assert found == expected


def test_threads_do_not_make_it_strike_too_often() -> None:
    rule = FaultRule("fail", "7", times=500)

    with ThreadPoolExecutor(8) as pool:
        struck = sum(sum(part) for part in pool.map(lambda _: fates(rule), range(16)))

    assert struck == rule.struck == 500


@pytest.mark.parametrize(
    "whom", [{"share": 1.5}, {"share": -0.1}, {"times": 0}, {"times": -1}, {"when": "always"}], ids=str
)
def test_mistakes_are_told_at_once(whom: Any) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(whom))):
        FaultRule("fail", "7", **whom)


def test_it_says_what_it_is() -> None:
    assert repr(FaultRule("fail billing", "7")) == "<FaultRule 'fail billing': struck 0 times>"
