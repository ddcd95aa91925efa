"""Sanitizing: no secret that the patterns can see leaves a handler in the text of an error.

Where a secret's *name* stands, everything behind it is masked, to the end of the text. Where its value ends cannot be
known (it may have blanks, quotes, line breaks in it), and an error that says too little is better than too much.
What a text says *before* the name is kept, for instance "Login failed for bob: password=[REDACTED]".
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

MAX_LENGTH = 500
MASK = "[REDACTED]"

# Names in any spelling: api_key, apiKey, API-KEY, "api key". What may stand before them is not asked: db_password,
# dbpassword and accessToken are all caught. What stands behind decides: see `_is_name`.
_NAMES = re.compile(
    r"password|secret|token|credential|bearer|(?:api|private)[^a-z]?key|connection[^a-z]?string", re.IGNORECASE
)
# Addresses of stores and brokers, and any other address with a user in it.
_ADDRESSES = re.compile(
    r"(?:postgres|kafka|mongodb|mysql|redis|amqp)[a-z0-9+]*://|[a-z][a-z0-9+.-]{0,40}://(?=[^/\s]*@)", re.IGNORECASE
)

# All that may stand behind a name without being a value: the end of a sentence, of a quotation, of a bracket.
_NO_VALUE = "\"'`)]}>.,;!? \t\r\n"

# Pydantic's own words name what was expected; these kinds repeat what came in, or are the words of a user's validator.
_TELLING_KINDS = frozenset(("value_error", "assertion_error", "union_tag_invalid"))


def sanitize(text: str) -> str:
    """Mask what follows the first name of a secret, and cut the text to a length fit for logs and results."""
    # Looking further than is kept: an address is known for one with a password by the @ behind it.
    text = text[: 4 * MAX_LENGTH]
    end = min((found.end() for found in _markers(text) if found.start() < MAX_LENGTH), default=None)
    if end is None or not text[end:].strip(_NO_VALUE):
        return text[:MAX_LENGTH]
    kept = text[: min(end, MAX_LENGTH - len(MASK) - 1)]
    return f"{kept}{MASK}" if kept.endswith("://") else f"{kept}={MASK}"


def describe_exception(error: BaseException) -> str:
    """The type of an exception and its sanitized words."""
    name = type(error).__name__
    if isinstance(error, ValidationError):
        return f"{name}: {describe_validation(error)}"[:MAX_LENGTH]
    try:
        words = sanitize(str(error))
    except Exception:
        words = "(its text could not be read)"
    return f"{name}: {words}"[:MAX_LENGTH] if words else name


def describe_validation(error: ValidationError, known_names: frozenset[str] = frozenset()) -> str:
    """What does not fit, in pydantic's words, without the input.

    Of a fault's place only names that the model declares are shown (`known_names`): others came with the input.
    """
    faults = [
        f"{_place(fault['loc'], known_names)}: {_words(fault)}"
        for fault in error.errors(include_url=False, include_context=False)
    ]
    return "; ".join(faults)[:MAX_LENGTH]


def _markers(text: str) -> Iterator["re.Match[str]"]:
    yield from (found for found in _NAMES.finditer(text) if _is_name(text, found))
    yield from _ADDRESSES.finditer(text)


def _is_name(text: str, found: "re.Match[str]") -> bool:
    """Whether the word ends here: "token" and "tokenValue" and "TOKEN_ID" do name one, "tokenize" does not."""
    in_capitals = found.group().isupper()
    following = text[found.end() : found.end() + 2].removeprefix("S" if in_capitals else "s")[:1]
    return not (following.isupper() if in_capitals else following.islower())


def _place(location: tuple[int | str, ...], known_names: frozenset[str]) -> str:
    parts = [str(part) if isinstance(part, int) or part in known_names else "*" for part in location]
    return ".".join(parts) or "payload"


def _words(fault: Mapping[str, Any]) -> str:
    message = str(fault["msg"])
    if fault["type"] == "union_tag_invalid":
        return str(fault["type"])
    if fault["type"] in _TELLING_KINDS and any(_repeats(message, leaf) for leaf in _leaves(fault["input"])):
        return str(fault["type"])
    return sanitize(message)


def _repeats(message: str, leaf: str) -> bool:
    """Whether a message quotes a part of the input: as it is, escaped, or stripped."""
    return any(form and form in message for form in (leaf, repr(leaf)[1:-1], leaf.strip()))


def _leaves(value: Any) -> Iterator[str]:
    """Every scalar inside an input, as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _leaves(item)
    else:
        yield str(value)
