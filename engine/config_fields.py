"""Which kinds of values do the sections of target and drafter share?"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("must be HOST:PORT")
    return value


def _device(value: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", value) is None:
        raise ValueError("must be cpu, cuda or cuda:N")
    return value


PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]
AddressText = Annotated[str, AfterValidator(_address)]
DeviceName = Annotated[str, AfterValidator(_device)]
