"""A bank that is down makes dead letters. Find them, mend the bank, and send again those that it is to blame for."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

from raydispatch import DispatchEngine, Envelope, MessageCategory, RetrySettings
from raydispatch.actors import DispatchSystem


def engine_in(folder: str) -> DispatchEngine:
    engine = DispatchEngine("orders", journal=f"sqlite:///{folder}/orders.db")
    bank = f"{folder}/bank"
    retry = RetrySettings(tries=2, first_delay_seconds=0.01)

    @engine.dispatcher(
        "billing", topics="*.order.events.*", category=MessageCategory.EVENT, replicas=2, retry=retry, breaker=None
    )
    def bill(envelope: Envelope[int]) -> None:
        if envelope.payload < 0:
            raise ValueError("a negative total")
        if not Path(bank).exists():
            raise ConnectionError("no answer from the bank")

    return engine


def wait_for_billing(system: DispatchSystem) -> None:
    while any(subscription.lag for subscription in system.status().subscriptions):
        sleep(0.1)


def errors(system: DispatchSystem) -> dict[str | None, int]:
    return dict(sorted(Counter(letter.outcome.error_type for letter in system.dead_letters("billing")).items()))


def main() -> None:
    with TemporaryDirectory() as folder, DispatchSystem.start(engine_in(folder)) as system:
        orders = [("dev.order.events.v1", Envelope(total, "Order", key="eva")) for total in range(-10, 90)]
        system.publish_many(orders, durable=True)
        wait_for_billing(system)
        print("dead letters:", errors(system))

        letter = system.dead_letters("billing", error_type="ValueError")[0]
        print("one of them:", letter.topic, "-", letter.outcome.error_message, "-", letter.outcome.attempts, "attempts")

        Path(folder, "bank").touch()
        print("the bank is back; sent again:", system.redrive("billing", error_type="ConnectionError"))
        wait_for_billing(system)
        print("dead letters:", errors(system))
        print("billed:", sum(subscription.acked for subscription in system.status().subscriptions))
        print("let go of:", system.purge_dead_letters(error_type="ValueError"))


if __name__ == "__main__":
    main()
