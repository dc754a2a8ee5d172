"""Packages and dependencies.

`megatron` is a namespace package: `megatron.core` comes from the wheel of megatron-core, or from a user's checkout of
Megatron-LM, the subpackages here lie beside it, and none has a `megatron/__init__.py`. So the wheel is an extra: where
there is a checkout, installing this package must not bring another megatron.core.

For an editable install the root is named as package directory and `megatron` itself as a package: setuptools then takes
the layout for a simple one and puts the repository on `sys.path`, where Python merges the folders by itself. Otherwise
it would write an import hook with a fixed list of today's subpackages.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    lines = (
        line.partition("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    )
    return [line for line in lines if line]


setup(
    name="megatron-pipeline",
    version="0.1.0",
    description="Pipeline-parallel training of transformers with the schedule as a program",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    classifiers=[
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),  # each has run the tests
    ],
    package_dir={"": "."},
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    package_data={
        "megatron.planner.published": ["residuals/*.json"],
        "megatron.planner.job": ["clusters/*.yaml"],
        "megatron.planner.search": ["report.css", "report.js"],
        "megatron.planner.time": ["calibrations/*.json"],
        "megatron.trainer.arguments.flags": ["megatron_lm.txt", "megatron_lm_in_help.txt"],
    },
    entry_points={"console_scripts": ["megatron-pipeline = megatron.commands.__main__:main"]},
    install_requires=requirements("runtime"),
    extras_require={
        name: requirements(name)
        for name in (
            "core",
            "test",
            "tensorboard",
            "tokenizers",
            "metis",
            "parquet",
            "datasets",
            "digits",
            "peft",
            "generation",
            "triton",
        )
    },
    zip_safe=False,
)
