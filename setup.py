"""The suites live in benchmarks/suites; a wheel carries them as sartor/suites. The rest is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages("src", exclude=["*__pycache__*"])
setup(
    packages=[*packages, "sartor.suites"],
    package_dir={"": "src", "sartor.suites": "benchmarks/suites"},
)
