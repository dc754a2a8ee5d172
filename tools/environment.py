"""Say which requirements the running interpreter lacks, so that scripts install only what is missing.

    python tools/environment.py requirements/runtime.txt requirements/pinned.txt

prints one missing requirement per line (nothing where all are met) and always exits 0. It needs a bare Python with pip.
"""

import os
import signal
import sys
from importlib import metadata

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing of the project can be imported yet

from pip._vendor.packaging.requirements import Requirement


def missing_requirements(paths: list[str]) -> list[str]:
    """The requirements of these files that no installed distribution meets, in order, each once."""
    missing = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
        for line in filter(None, lines):
            requirement = Requirement(line)
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = None
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                missing.append(line)
    return list(dict.fromkeys(missing))


if __name__ == "__main__":
    for line in missing_requirements(sys.argv[1:]):
        print(line)
