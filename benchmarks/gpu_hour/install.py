"""Make importable what the hour needs and this Python lacks, from a folder of wheels, without a network.

    python benchmarks/gpu_hour/install.py --wheels wheels --target outputs/gpu_hour/site

Problem: an image with torch has its own versions of most packages, and those have to serve. Solution: of the wheels
that this Python can take, only those are installed whose package is not there at all, in a folder that goes onto the
path. Nothing of the project can be imported before this has run.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "wheels", Path(__file__).resolve().parent.parent / "wheels", ROOT.parent / "wheels")
"""Where wheels are looked for, if --wheels does not say."""
NEEDED = ("torch", "setuptools", "megatron.core", "psutil", "yaml", "pytest", "pytest_timeout", "hypothesis")


def missing_wheels(folder: Path) -> dict[str, str]:
    """Package -> version, of the wheels that this Python can take and whose package is not installed."""
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    taken, found = set(sys_tags()), {}
    installed = {canonicalize_name(each.metadata["Name"] or "") for each in metadata.distributions()}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if name not in installed and tags & taken:
            found[name] = str(version)
    return found


def install(folder: Path, target: Path) -> list[str]:
    """Install what is missing. Returns its names. Raises ValueError where pip cannot."""
    found = missing_wheels(folder)
    words = [f"{name}=={version}" for name, version in found.items()]
    if words:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        command += ["--no-deps", "--no-compile", "--find-links", str(folder), "--target", str(target), "--upgrade"]
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise ValueError(f"pip could not install {', '.join(words)} from {folder}: {said[-1]}")
    return words


def lacking() -> list[str]:
    importlib.invalidate_caches()

    def is_there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # of a package above it
            return False

    return [name for name in NEEDED if not is_there(name)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="default: `wheels` beside the checkout or in it")
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(arguments)
    folder = args.wheels or next((each for each in FOLDERS if each.is_dir()), None)
    sys.path[:0] = [str(ROOT), str(args.target)]
    try:
        if args.wheels is not None and not args.wheels.is_dir():
            raise ValueError(f"--wheels is {args.wheels}, which is no folder; give the one of tools/pack_wheels.sh")
        names = install(folder, args.target) if folder is not None else []
        if lacks := lacking():
            where = (
                "no folder of wheels is there" if folder is None else f"{folder} has no wheel that this Python takes"
            )
            raise ValueError(
                f"{', '.join(lacks)} cannot be imported, and {where}; make a folder with tools/pack_wheels.sh where "
                "there is a network, and give it as --wheels"
            )
    except ValueError as error:
        print(f"gpu_hour: error: {error}", file=sys.stderr)
        return 1
    print(f"installed from {folder}: {', '.join(names)}" if names else "nothing had to be installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
