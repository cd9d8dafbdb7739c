"""The arguments whose memory a compiled kernel reads before it waits for the kernels ahead, by its PTX."""

from __future__ import annotations

import re

from compiled import Case

WAIT = "griddepcontrol.wait"
# The address is what stands in the first brackets, or for copies to shared memory in the second.
READS = re.compile(r"\b(?:ld|cp\.async)\S*\s+[^\[]*\[\s*(%\w+)[^\]]*\](?:\s*,\s*\[\s*(%\w+))?")
PARAMETER = re.compile(r"\w+_param_(\d+)")


def read_early(ptx: str, case: Case) -> set[str]:
    """Return the pointers and descriptors through which is read before the first wait.

    Registers are followed through the text from the parameters on; what is loaded from memory is no pointer.
    What is only brought to the L2 cache is not read.
    """
    if WAIT not in ptx:
        return set()
    names = parameter_names(case)
    origins: dict[str, set[int]] = {}
    found: set[int] = set()
    for line in ptx.split(".section", maxsplit=1)[0].splitlines():
        code = line.split("//")[0].strip()
        if WAIT in code:
            break
        code = re.sub(r"^@!?%\w+\s+", "", code)
        if re.match(r"(ld\.global|ld\.b|cp\.async)", code):
            match = READS.search(code)
            if match is not None:
                address = match[2] if code.startswith("cp.async") and match[2] else match[1]
                found |= origins.get(address, set())
            continue
        registers = re.findall(r"%\w+", code)
        if not registers or code.startswith((".", "st.", "bra", "setp")):
            continue
        came = {int(number) for number in PARAMETER.findall(code)}
        for register in registers[1:]:
            came |= origins.get(register, set())
        origins[registers[0]] = came
    return {names[number] for number in found if number in names}


def parameter_names(case: Case) -> dict[int, str]:
    """Return which argument each parameter is that an address comes from.

    A descriptor's shape and strides follow it as parameters of their own.
    """
    found: dict[int, str] = {}
    number = 0
    for name in case.kernel.arg_names:
        if name in case.constants:
            continue
        kind = case.types.get(name, "i32")
        if kind.startswith("tensordesc"):
            found[number] = name
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            number += 1 + 2 * rank
        else:
            if kind.startswith("*"):
                found[number] = name
            number += 1
    return found
