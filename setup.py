"""Build of espnet-mega-bias: the package and the two start-up files beside it."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
STARTUP_FILES = (
    "startup/espnet_mega_bias.pth",  # Python up to 3.14
    "startup/espnet_mega_bias.start",  # PEP 829, from Python 3.15 on
)


class BuildWithStartupFiles(build_py):
    """Put the start-up files at the root of the wheel, that is, in site-packages.

    `build_py` is the one command that both a wheel and an editable install run. Its
    ``build_lib`` becomes the wheel's root, but is thrown away for an editable one,
    where the root is ``install_lib``.
    """

    def run(self):
        """Build the modules, then copy the start-up files."""
        super().run()
        root = (
            self.get_finalized_command("install").install_lib
            if self.editable_mode
            else self.build_lib
        )
        self.mkpath(root)
        for name in STARTUP_FILES:
            self.copy_file(str(ROOT / name), root)


def read_version():
    """Return ``__version__`` without importing the package."""
    source = (ROOT / "espnet_mega_bias" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]


plot = ["matplotlib"]
export = ["onnx", "onnxruntime", "onnxscript"]
recipe = [
    *plot,
    "PyYAML",
    "editdistance",
    "jiwer",
    "soundfile",
    # ESPnet's trainer imports it whatever the options.
    "tensorboard",
]
# ESPnet 202511's own extra pins old packages; ESPnet3 came after it.
egs3 = [*recipe, 'espnet[train]>=202611; python_version >= "3.12"']

setup(
    name="espnet-mega-bias",
    version=read_version(),
    description="MEGA decoder with rotary relative position bias for ESPnet",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The espnet_mega_bias developers",
    keywords=["speech recognition", "ESPnet", "transducer", "RNN-T", "MEGA", "EMA"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Multimedia :: Sound/Audio :: Speech",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    project_urls={
        "Paper (MEGA)": "https://arxiv.org/abs/2209.10655",
        "ESPnet": "https://github.com/espnet/espnet",
    },
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["espnet_mega_bias", "espnet_mega_bias.*"]),
    # On its own, so that a start of Python does not search a package's folder too.
    py_modules=["espnet_mega_bias_autoload"],
    # Said explicitly, this layout makes an editable install one line of path. Else
    # setuptools writes a finder, whose imports each start of Python would pay for.
    package_dir={"": "."},
    install_requires=[
        "espnet>=202511",
        "numpy",
        "packaging",
        "typeguard",
        # torchaudio's wheels load beside the torch that they were built for, and from
        # 2.11.1 on beside torch 2.13 and newer. ESPnet 202511 leaves both open.
        'torch>=2.11,<2.12; python_version < "3.12"',
        'torchaudio==2.11.0; python_version < "3.12"',
        'torch>=2.11,!=2.12.*,<2.15; python_version >= "3.12"',
        'torchaudio>=2.11,<2.12; python_version >= "3.12"',
    ],
    extras_require={
        "plot": plot,
        "export": export,
        "recipe": recipe,
        "egs3": egs3,
        # From `build` on, for the tests that build and install the package.
        "test": [
            *egs3,
            *export,
            "hypothesis",
            "pytest",
            "pytest-xdist",
            "ruff",
            "build",
            "setuptools>=69.5",
            "twine",
            "wheel",
        ],
    },
    entry_points={
        "console_scripts": ["espnet-mega-bias=espnet_mega_bias.bin.main:main"]
    },
    cmdclass={"build_py": BuildWithStartupFiles},
)
