"""Ask, and wait for the reply, wherever it comes from and whenever; or hear clearly why there is none."""

import asyncio

from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.errors import LateReply, RequestFailed, RequestTimeout

engine = DispatchEngine("weather")
slow_answers: list[Envelope[str]] = []


@engine.dispatcher("station", topics="weather.intents.now", category=MessageCategory.INTENT)
async def station(envelope: Envelope[str]) -> Reply | str:
    # What it knows it answers at once; for the rest, the question goes on, and somebody else replies.
    return Reply("12 degrees") if envelope.payload == "Graz" else "weather.intents.ask-satellite"


@engine.dispatcher("satellite", topics="weather.intents.ask-satellite", category=MessageCategory.INTENT)
async def satellite(envelope: Envelope[str]) -> Reply | None:
    if envelope.payload == "Atlantis":
        slow_answers.append(envelope)
        return None
    return Reply("cloudy")


async def main() -> None:
    async with engine:
        for place in ("Graz", "Oslo"):
            reply = await engine.request("weather.intents.now", Envelope(place, message_type="Question"), timeout=5)
            print(f"{place}: {reply.payload}")

        try:
            await engine.request("weather.intents.now", Envelope("Atlantis", message_type="Question"), timeout=0.2)
        except RequestTimeout as error:
            print("Atlantis:", type(error).__name__)
        try:
            engine.reply(slow_answers[0].correlation_id, "wet")
        except LateReply as error:
            print("its answer:", type(error).__name__)

        try:
            await engine.request("weather.intents.tomorrow", Envelope("Graz", message_type="Question"), timeout=5)
        except RequestFailed as error:
            print("tomorrow:", error.result.status)


if __name__ == "__main__":
    asyncio.run(main())
