"""The build of the package: scikit-build-core, after a check that there is a compiler."""

import os
import shutil

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403

COMPILERS = ("c++", "g++", "clang++")


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    """The packages that the build needs: CMake and ninja, if they are not installed."""
    if "CXX" not in os.environ and not any(map(shutil.which, COMPILERS)):
        raise SystemExit(
            "regard-native needs a C++17 compiler (gcc or clang), and there is none on the PATH; "
            "regard works without regard-native, with torch"
        )
    return build.get_requires_for_build_wheel(config_settings)
