"""Write the SHA-256 sums of the packages that the images hold: `python docker/hashes.py`, in a clone's environment.

It asks the Python Package Index for the files of each pinned version that fit the Pythons and processors of the images.
It writes `docker/hashes.txt` in pip's syntax, with one part for the dependencies of trainer and one for each extra.
torch has its own index, which serves another build; CUDA's packages come with it.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / "docker" / "hashes.txt"
PYTHONS = ("3.11", "3.12")
PROCESSORS = ("x86_64", "aarch64")
EXTRAS = (
    "deepspeed",
    "excel",
    "generation",
    "lora",
    "mining",
    "mlflow",
    "onnx",
    "quantization",
    "schedule-free",
    "search",
    "tensorboard",
    "wandb",
)
_INDEX = "https://pypi.org/simple"
_OWN_INDEX = frozenset(("torch", "triton"))


def environments() -> list[dict[str, str]]:
    """Return the values of pip's markers in each image."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    return [
        {**linux, "python_version": python, "python_full_version": f"{python}.0", "platform_machine": processor,
         "implementation_name": "cpython", "platform_python_implementation": "CPython"}
        for python in PYTHONS
        for processor in PROCESSORS
    ]  # fmt: skip


def pins() -> dict[str, list[Requirement]]:
    """Return the pins of `constraints.txt` that some image uses, by package."""
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or any(map(pin.marker.evaluate, environments())):
                found.setdefault(canonicalize_name(pin.name), []).append(pin)
    return found


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the packages that requirements need in some image, as the installed distributions name them."""
    found: set[str] = set()
    waiting = [(Requirement(line), environment) for line in requirements for environment in environments()]
    seen = set()
    while waiting:
        requirement, environment = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            key = (name, extra, environment["python_version"], environment["platform_machine"])
            if key in seen:
                continue
            seen.add(key)
            found.add(name)
            for line in requires(name) or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({**environment, "extra": extra}):
                    waiting.append((needed, environment))
    return found


def parts() -> Iterator[tuple[str, list[Requirement]]]:
    """Yield the name of each part with its pins; the first part has none."""
    from requirements import requirements

    pinned = pins()
    base = closure(requirements([]))
    for part in ("", *EXTRAS):
        names = closure(requirements([part])) - base if part else base
        yield part, [pin for name in sorted(names - _OWN_INDEX) for pin in pinned.get(name, ())]


def files_of(pin: Requirement) -> list[dict[str, Any]]:
    """Return the files of a pinned version that an image may choose: wheels, or else the source."""
    name, version = canonicalize_name(pin.name), next(iter(pin.specifier)).version
    request = urllib.request.Request(f"{_INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = json.load(answer)["files"]
    wheels = [file for file in files if file["filename"].endswith(".whl") and _fits(file["filename"], version)]
    sources = [file for file in files if _is_source(file["filename"], name, version)]
    found = wheels or sources
    if not found:
        raise SystemExit(f"{_INDEX}/{name}/ has no file of {version} for the images; pin another version")
    return sorted(found, key=lambda file: str(file["filename"]))


def _fits(filename: str, version: str) -> bool:
    if f"-{version}-" not in filename:  # old names are not all valid
        return False
    _, found, _, tags = parse_wheel_filename(filename)
    interpreters = {f"cp{python.replace('.', '')}" for python in PYTHONS}
    return str(found) == version and any(
        (tag.interpreter in interpreters or tag.interpreter in ("py3", "py2.py3") or tag.abi == "abi3")
        and tag.abi in (*interpreters, "none", "abi3")
        and (tag.platform == "any" or (tag.platform.startswith("manylinux") and tag.platform.endswith(PROCESSORS)))
        for tag in tags
    )


def _is_source(filename: str, name: str, version: str) -> bool:
    stem = filename.removesuffix(".tar.gz")
    return stem != filename and canonicalize_name(stem.removesuffix(f"-{version}")) == name and stem.endswith(version)


def main() -> None:
    """Write the file."""
    lines = [
        "# SHA-256 sums of the packages in the images, by docker/hashes.py. A part is one extra; see docker/README.md."
    ]
    for part, pinned in parts():
        lines.append(f"# {part or 'trainer'}")
        for pin in pinned:
            marker = f" ; {pin.marker}" if pin.marker else ""
            sums = [f"    --hash=sha256:{file['hashes']['sha256']}" for file in files_of(pin)]
            lines += [" \\\n".join([f"{pin.name}{pin.specifier}{marker}", *sums])]
    HASHES.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
