"""Topic patterns: how they read, what they match, and which of two is the more specific.

A pattern is a list of segments separated by dots. `*` stands for one segment and `**` for zero or more; inside a
segment, `*` stands for any run of characters, `?` for one character, and `[abc]`, `[a-z]`, `[!a]` for one of a class. A
pattern that starts with `regex:` is a regular expression (RE2) for the whole topic. Case never matters.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from raydispatch.errors import InvalidPattern
from raydispatch.messages.topic import segments_of

MAX_PATTERN_LENGTH = 500
REGEX_PREFIX = "regex:"


class PatternKind(IntEnum):
    """In the order in which matches stand when their priorities are equal."""

    EXACT = 0
    GLOB = 1
    REGEX = 2


class SegmentKind(IntEnum):
    """What a segment of a pattern takes: itself, what it looks like, any one, or any number."""

    LITERAL = 0
    PARTIAL = 1
    ANY = 2
    REST = 3


class Segment(NamedTuple):
    """One segment of a pattern; its text is case-folded."""

    kind: SegmentKind
    text: str

    def accepts(self, segment: str) -> bool:
        """Whether this takes a folded topic segment (for `**`: any one of those it stands for)."""
        if self.kind is SegmentKind.LITERAL:
            return segment == self.text
        return self.kind is not SegmentKind.PARTIAL or partial_matcher(self.text)(segment) is not None


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    Example: `parse_pattern("*.order.events.**").matches("dev.order.events")`.
    """

    text: str
    kind: PatternKind
    segments: tuple[Segment, ...] = ()

    @cached_property
    def specificity(self) -> tuple[int, int, int, int, int]:
        """Smaller is more specific: kind, number of `**`, of `*`, of partial segments, fewest literals last."""
        kinds = [segment.kind for segment in self.segments]
        return (
            self.kind,
            kinds.count(SegmentKind.REST),
            kinds.count(SegmentKind.ANY),
            kinds.count(SegmentKind.PARTIAL),
            -kinds.count(SegmentKind.LITERAL),
        )

    def matches(self, topic: str) -> bool:
        """Whether a topic fits; a malformed topic fits nothing."""
        segments = segments_of(topic)
        if not segments:
            return False
        if self.kind is PatternKind.REGEX:
            return bool(regex_set([self.text]).Match(".".join(segments)))
        return _fits(self.segments, segments)


@lru_cache(maxsize=16_384)
def parse_pattern(text: str) -> Pattern:
    """Read a pattern, or raise `InvalidPattern` with the position of its first fault."""
    if not text.strip():
        raise InvalidPattern(text, 0, "it is empty")
    if len(text) > MAX_PATTERN_LENGTH:
        raise InvalidPattern(text, MAX_PATTERN_LENGTH, f"it has more than {MAX_PATTERN_LENGTH} characters")
    if not text.isprintable():
        position = next(i for i, character in enumerate(text) if not character.isprintable())
        raise InvalidPattern(text, position, "this character does not print, so no topic can have it")
    if text.startswith(REGEX_PREFIX):
        _check_regex(text)
        return Pattern(text, PatternKind.REGEX)
    segments = tuple(_parse_segments(text))
    exact = all(segment.kind is SegmentKind.LITERAL for segment in segments)
    return Pattern(text, PatternKind.EXACT if exact else PatternKind.GLOB, segments)


@lru_cache(maxsize=16_384)
def partial_matcher(text: str) -> "Callable[[str], re.Match[str] | None]":
    """The matcher of a segment such as `order-*`: linear in the segment's length, whatever the pattern."""
    fixed = [_translate(part) for part in _split_at_stars(text)]
    first, *middle = fixed
    # Each piece between two stars has a fixed length, so its leftmost place is as good as any other: an atomic
    # group keeps it there, and `*a*a*a*a*b` cannot backtrack.
    anchored = "".join(f"(?>.*?{piece})" for piece in middle[:-1])
    return re.compile(first + anchored + "".join(f".*{piece}" for piece in middle[-1:]), re.DOTALL).fullmatch


def sample_segment(segment: Segment) -> str:
    """A folded topic segment that this one accepts."""
    if segment.kind is SegmentKind.LITERAL:
        return segment.text
    if segment.kind is not SegmentKind.PARTIAL:
        return "x"
    # Every class has a member among these: its own first one, or, if negated, one that it does not exclude.
    sample = re.sub(r"\[(!?)([^]]*)\]", lambda found: _sample_member(*found.groups()), segment.text)
    return sample.replace("*", "").replace("?", "x") or "x"


def regex_set(patterns: "Sequence[str]") -> Any:
    """Compile `regex:` patterns into one RE2 set: `.Match(topic)` gives the indices of all that fit, in one pass."""
    re2, options = _re2()
    compiled = re2.Set.FullMatchSet(options)
    for pattern in patterns:
        compiled.Add(_regex_of(pattern))
    compiled.Compile()
    return compiled


def _fits(pattern: tuple[Segment, ...], topic: "Sequence[str]") -> bool:
    """Match greedily; on a mismatch, let the last `**` take one segment more. At worst, the product of the lengths."""
    p = t = 0
    rest = taken = -1
    while t < len(topic):
        if p < len(pattern) and pattern[p].kind is SegmentKind.REST:
            rest, taken = p, t
            p += 1
        elif p < len(pattern) and pattern[p].accepts(topic[t]):
            p += 1
            t += 1
        elif rest >= 0:
            taken += 1
            p, t = rest + 1, taken
        else:
            return False
    return all(segment.kind is SegmentKind.REST for segment in pattern[p:])


def _parse_segments(text: str) -> list[Segment]:
    segments = []
    start = 0
    for part in _split_at_dots(text):
        segments.append(_parse_segment(text, part, start))
        start += len(part) + 1
    return segments


def _split_at_dots(text: str) -> list[str]:
    parts = text.split(".")
    start = 0
    for part in parts:
        if not part:
            raise InvalidPattern(text, min(start, len(text) - 1), "a segment is empty here")
        start += len(part) + 1
    return parts


def _parse_segment(text: str, part: str, start: int) -> Segment:
    if part == "**":
        return Segment(SegmentKind.REST, part)
    if part == "*":
        return Segment(SegmentKind.ANY, part)
    if "**" in part:
        raise InvalidPattern(text, start + part.index("**"), "'**' must be a whole segment")
    if "[" in part:
        _check_classes(text, part, start)
    folded = part.casefold()
    partial = any(character in folded for character in "*?[")
    return Segment(SegmentKind.PARTIAL if partial else SegmentKind.LITERAL, folded)


def _check_classes(text: str, part: str, start: int) -> None:
    position = part.find("[")
    while position >= 0:
        end = part.find("]", position + 1)
        if end < 0:
            raise InvalidPattern(text, start + position, "this '[' has no ']' in its segment")
        members = part[position + 1 : end].removeprefix("!")
        if not members:
            raise InvalidPattern(text, start + position, "this class is empty")
        if len(members.casefold()) != len(members):
            raise InvalidPattern(text, start + position, "this class has a character that folds into several")
        for low, high in class_ranges(members.casefold()):
            if low > high:
                raise InvalidPattern(text, start + position, f"the range {low}-{high} is empty")
        position = part.find("[", end)


def class_ranges(members: str) -> list[tuple[str, str]]:
    """The members of a class as ranges; a single character is a range of one."""
    found = []
    i = 0
    while i < len(members):
        if members[i + 1 : i + 2] == "-" and i + 2 < len(members):
            found.append((members[i], members[i + 2]))
            i += 3
        else:
            found.append((members[i], members[i]))
            i += 1
    return found


def _sample_member(negation: str, members: str) -> str:
    ranges = class_ranges(members)
    if not negation:
        return ranges[0][0]
    return next(c for c in map(chr, range(ord("a"), 0x110000)) if not any(low <= c <= high for low, high in ranges))


def _split_at_stars(text: str) -> list[str]:
    """Split at the stars that stand outside of classes."""
    parts = [""]
    in_class = False
    for character in text:
        if character == "*" and not in_class:
            parts.append("")
            continue
        in_class = character != "]" if in_class else character == "["
        parts[-1] += character
    return parts


def _translate(part: str) -> str:
    """Turn a piece without stars into a regular expression of fixed length."""
    translated = ""
    i = 0
    while i < len(part):
        if part[i] == "[":
            end = part.index("]", i + 1)
            members = part[i + 1 : end]
            ranges = "".join(f"{re.escape(a)}-{re.escape(b)}" for a, b in class_ranges(members.removeprefix("!")))
            translated += f"[{'^' if members.startswith('!') else ''}{ranges}]"
            i = end
        else:
            translated += "." if part[i] == "?" else re.escape(part[i])
        i += 1
    return translated


def _check_regex(text: str) -> None:
    re2, options = _re2()
    if text == REGEX_PREFIX:
        raise InvalidPattern(text, len(REGEX_PREFIX) - 1, "there is no regular expression after the prefix")
    try:
        re2.compile(_regex_of(text), options)
    except re2.error as error:
        reason, _, fragment = error.args[0].decode(errors="replace").partition(": ")
        # RE2 names the faulty part and not its position; the first place it stands at is where to look.
        position = text.find(fragment, len(REGEX_PREFIX)) if fragment else -1
        raise InvalidPattern(text, max(position, len(REGEX_PREFIX)), reason) from None


def _regex_of(text: str) -> str:
    return text.removeprefix(REGEX_PREFIX)


@lru_cache(maxsize=1)
def _re2() -> tuple[Any, Any]:
    # Loaded on the first use: most tables have no regular expression.
    import re2

    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = False
    # A ceiling, not a reservation. RE2's own of 8 MB is too tight for a set of a thousand expressions.
    options.max_mem = 256 << 20
    return re2, options
