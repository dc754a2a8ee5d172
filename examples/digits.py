"""Images of handwritten digits for pretrain_vision_classify.py, from scikit-learn; nothing is downloaded.

    python examples/digits.py --classes 0-4 --folder DATA/first        # pip install .[digits]
    python examples/digits.py --classes 5-9 --folder DATA/second

`load_digits` has 1,797 images of 8 x 8 pixels. Those of the classes that are asked for become `train.npz`,
`validation.npz` and `test.npz` (images from -1 to 1, labels from 0 on in the order of the classes), drawn by --seed.
"""

import argparse
import sys
from pathlib import Path

import numpy

_MIDDLE = 8  # of the pixels, which go from 0 to 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    parser.add_argument("--classes", default="0-9", help="digits, such as 0-4 or 1,3,7 (default: 0-9)")
    parser.add_argument("--validation", type=float, default=0.15, help="share of validation data (default: 0.15)")
    parser.add_argument("--test", type=float, default=0.2, help="share of test data (default: 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the shares (default: 0)")
    options = parser.parse_args()
    try:
        classes = read_classes(options.classes)
        from sklearn.datasets import load_digits
    except ValueError as error:
        parser.error(str(error))
    except ImportError:
        parser.error("scikit-learn is not installed; pip install .[digits]")
    digits = load_digits()
    write(digits.images, digits.target, classes, options)
    return 0


def read_classes(text: str) -> list[int]:
    """The digits of "0-4" or "1,3,7". Raises ValueError."""
    classes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--classes {text} are no digits; write for example 0-4 or 1,3,7")
        classes += range(int(first), int(last if dash else first) + 1)
    if len(set(classes)) != len(classes) or len(classes) < 2 or max(classes) > 9:
        raise ValueError(f"--classes {text} are not two or more different digits; write for example 0-4 or 1,3,7")
    return classes


def write(images: numpy.ndarray, targets: numpy.ndarray, classes: list[int], options: argparse.Namespace) -> None:
    """The three files, of the images of `classes`."""
    chosen = numpy.flatnonzero(numpy.isin(targets, classes))
    numpy.random.RandomState(options.seed).shuffle(chosen)
    num_test, num_validation = (round(share * len(chosen)) for share in (options.test, options.validation))
    parts = {
        "test": chosen[:num_test],
        "validation": chosen[num_test : num_test + num_validation],
        "train": chosen[num_test + num_validation :],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        pixels = (images[part] / _MIDDLE - 1).astype(numpy.float32)
        labels = numpy.array([classes.index(target) for target in targets[part]], dtype=numpy.int64)
        numpy.savez(options.folder / f"{name}.npz", images=pixels, labels=labels)
        print(f"{options.folder / name}.npz: {len(part)} images of {len(classes)} classes")


if __name__ == "__main__":
    sys.exit(main())
