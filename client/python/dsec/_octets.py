"""Octets and JSON: argv, environment, cwd and paths may hold any octets, JSON only text.

The wire has a text field and a twin `<field>_raw` (base64). A `str` whose undecodable octets are surrogate escapes (as `os.fsdecode` makes
them) and `bytes` are both taken; answers come as such `str`, so that they can be given back unchanged.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import math
import re
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, TypeVar, Union

from .errors import Internal, Invalid

Octets = Union[str, bytes]
JSON = Dict[str, object]
T = TypeVar("T")


def encode(value: Octets, what: str = "value") -> bytes:
    """The octets of a value."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{what}: want str or bytes, not {type(value).__name__}")
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise Invalid(f"{what}: has a lone surrogate at {e.start}; give bytes instead") from None


def decode(value: bytes) -> str:
    """Octets as a str that `encode` turns back."""
    return value.decode("utf-8", "surrogateescape")


def text_of(value: Octets, what: str) -> str:
    """For fields of the wire that have no raw twin."""
    try:
        return encode(value, what).decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid(f"{what}: must be UTF-8") from None


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def put(body: JSON, field: str, value: Optional[Octets]) -> None:
    """Sets a field or its raw twin."""
    if value is None or value in ("", b""):
        return
    data = encode(value, field)
    try:
        body[field] = data.decode("utf-8")
    except UnicodeDecodeError:
        body[field + "_raw"] = base64_of(data)


def put_list(body: JSON, field: str, values: Iterable[Octets]) -> None:
    """Sets a repeated field, or its raw twin when one entry is no text."""
    data = [encode(v, f"{field}[{i}]") for i, v in enumerate(values)]
    try:
        body[field] = [d.decode("utf-8") for d in data]
    except UnicodeDecodeError:
        body[field + "_raw"] = [base64_of(d) for d in data]


def env_vars(env: Optional[Mapping[Octets, Octets]], secret: Iterable[Octets] = ()) -> List[JSON]:
    """An environment as the wire has it; `secret` are the names whose values the log must not hold."""
    hidden = {encode(s, "secret_env") for s in secret}
    out: List[JSON] = []
    names = set()
    for name, value in (env or {}).items():
        one: JSON = {}
        put(one, "name", name)
        put(one, "value", value)
        names.add(encode(name, "env"))
        if encode(name, "env") in hidden:
            one["secret"] = True
        out.append(one)
    for name in sorted(hidden - names):
        raise Invalid(f"secret_env {name!r}: is not in env")
    return out


def milliseconds(seconds: Optional[float], what: str) -> int:
    """A duration of the wire; one above 0 never becomes 0, which would mean the default."""
    if seconds is None:
        return 0
    if math.isnan(seconds) or math.isinf(seconds) or abs(seconds) > 1e12:
        raise Invalid(f"{what} {seconds}: want seconds")
    return math.ceil(seconds * 1000) if seconds > 0 else math.floor(seconds * 1000)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([kmgt]?)(?:i?b)?")


def size(value: Union[int, float, str], what: str) -> int:
    """Octets: a number of them, or text with a unit of 1,024s as the command line takes it ("512m", "1.5g")."""
    if isinstance(value, str):
        m = _SIZE.fullmatch(value.strip().lower())
        if m:
            return _octets(float(m[1]) * (1 << 10 * " kmgt".index(m[2] or " ")), value, what)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == value // 1:
        return _octets(value, value, what)
    raise Invalid(f"{what} {str(value)[:80]!r}: want a number of octets, or a size such as '512m' or '1g'")


def _octets(n: float, value: object, what: str) -> int:
    if n > 1 << 62:
        raise Invalid(f"{what} {str(value)[:80]!r}: larger than any machine's")
    return int(n)


class Fields:
    """Typed access to an answer. What is absent is the zero value (as protobuf's JSON has it); of the wrong type: `Internal`."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data

    def _bad(self, name: str) -> Internal:
        return Internal(f"answer: field {name}: {str(self.data.get(name))[:80]!r} is of the wrong type")

    def text(self, name: str) -> str:
        v = self.data.get(name, "")
        if not isinstance(v, str):
            raise self._bad(name)
        return v

    def number(self, name: str, default: int = 0) -> int:
        v = self.data.get(name, default)
        if isinstance(v, bool) or not isinstance(v, (int, str)):
            raise self._bad(name)
        try:
            return int(v)
        except ValueError:
            raise self._bad(name) from None

    def flag(self, name: str) -> bool:
        v = self.data.get(name, False)
        if not isinstance(v, bool):
            raise self._bad(name)
        return v

    def raw(self, name: str) -> bytes:
        try:
            return base64.b64decode(self.text(name), validate=True)
        except (binascii.Error, ValueError):
            raise self._bad(name) from None

    def octets(self, name: str) -> str:
        return decode(self.raw(name + "Raw")) if self.data.get(name + "Raw") else self.text(name)

    def octet_list(self, name: str) -> List[str]:
        raw = self.texts(name + "Raw")
        return [decode(base64.b64decode(r)) for r in raw] if raw else self.texts(name)

    def seconds(self, name: str) -> float:
        return self.number(name) / 1000

    def time(self, name: str) -> Optional[datetime.datetime]:
        v = self.text(name)
        if not v:
            return None
        try:
            head, _, fraction = v.rstrip("Z").partition(".")  # not strptime: every outcome has two of these
            date, _, clock = head.partition("T")
            year, month, day = map(int, date.split("-"))
            hour, minute, second = map(int, clock.split(":"))
            micros = int((fraction + "000000")[:6])
            return datetime.datetime(year, month, day, hour, minute, second, micros, datetime.timezone.utc)
        except ValueError:
            raise self._bad(name) from None

    def sub(self, name: str) -> Fields:
        v = self.data.get(name) or {}
        if not isinstance(v, dict):
            raise self._bad(name)
        return Fields(v)

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def _list(self, name: str) -> Sequence[object]:
        v = self.data.get(name) or []
        if not isinstance(v, list):
            raise self._bad(name)
        return v

    def texts(self, name: str) -> List[str]:
        return [str(v) for v in self._list(name)]

    def ints(self, name: str) -> List[int]:
        return [Fields({name: v}).number(name) for v in self._list(name)]

    def subs(self, name: str, make: Callable[[Fields], T]) -> List[T]:
        out: List[T] = []
        for v in self._list(name):
            if not isinstance(v, dict):
                raise self._bad(name)
            out.append(make(Fields(v)))
        return out

    def texts_by_name(self, name: str) -> Dict[str, str]:
        return {str(k): str(v) for k, v in self.sub(name).data.items()}
