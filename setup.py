"""What setup.cfg cannot say: kernels in C that are compiled where gcc is there, and links for a package index."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PREBUILT = "nano_loop/kernels/prebuilt"


def module_at(path):
    """Load a module by its path: the package around it needs torch."""
    path = Path(__file__).parent / path
    specification = importlib.util.spec_from_file_location(f"nano_loop_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class BuildKernels(Command):
    command_name = "build_kernels"
    description = "compile the kernels in C for all levels; without gcc, the package is pure"
    user_options: ClassVar[list] = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None
        self.libraries = []

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        compiler = module_at("nano_loop/kernels/compiler.py")
        folder = compiler.PREBUILT if self.editable_mode else Path(self.build_lib, PREBUILT)
        try:
            if os.environ.get("NANO_LOOP_KERNELS") in (compiler.OFF, compiler.COMPILE):
                raise compiler.UnavailableError("by NANO_LOOP_KERNELS")
            self.libraries = module_at("scripts/compile_levels.py").compile_levels(compiler, folder)
        except compiler.UnavailableError as error:
            self.warn(f"the package has no kernels in C, which are compiled at first use instead: {error}")
            if not self.editable_mode:
                shutil.rmtree(folder, ignore_errors=True)  # those of a build before

    def get_source_files(self):
        return []  # package_data has them

    def get_outputs(self):
        return [str(library) for library in self.libraries]

    def get_output_mapping(self):
        return {}


class BdistWheel(bdist_wheel):
    """Tags a wheel with kernels by the platform alone: its libraries need neither Python nor torch to be loaded."""

    command_name = "bdist_wheel"

    def run(self):
        self.run_command("build_kernels")
        if self.get_finalized_command("build_kernels").libraries:
            self.distribution.has_ext_modules = lambda: True
            self.root_is_pure = False
        super().run()

    def get_tag(self):
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class LinkedDistribution(Distribution):
    """Describes itself by README, whose relative links lead nowhere on a package index."""

    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        source = (self.metadata.project_urls or {}).get("Source")

        def target_of(path, is_picture):
            return source and f"{source}/{'raw' if is_picture else 'blob'}/HEAD/{path}"

        if source:
            pages = {"Documentation": "docs", "Changelog": "CHANGELOG.md"}
            self.metadata.project_urls |= {name: target_of(path, False) for name, path in pages.items()}
            self.metadata.project_urls["Issues"] = f"{source}/issues"
        described = self.metadata.long_description
        self.metadata.long_description = module_at("scripts/links.py").relinked(described, target_of)


build.sub_commands = [*build.sub_commands, ("build_kernels", None)]
setup(cmdclass={"build_kernels": BuildKernels, "bdist_wheel": BdistWheel}, distclass=LinkedDistribution)
