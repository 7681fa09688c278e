"""What setup.cfg cannot say: the kernels in C are compiled into the package, where gcc is there."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PREBUILT = "nano_loop/kernels/prebuilt"


def compiler_module():
    """Load the module by its path: the package around it needs torch."""
    path = Path(__file__).parent / "nano_loop/kernels/compiler.py"
    specification = importlib.util.spec_from_file_location("nano_loop_compiler", path)
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
        compiler = compiler_module()
        folder = compiler.PREBUILT if self.editable_mode else Path(self.build_lib, PREBUILT)
        try:
            if os.environ.get("NANO_LOOP_KERNELS") in (compiler.OFF, compiler.COMPILE):
                raise compiler.UnavailableError("by NANO_LOOP_KERNELS")
            self.libraries = compiler.compile_levels(folder)
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


build.sub_commands = [*build.sub_commands, ("build_kernels", None)]
setup(cmdclass={"build_kernels": BuildKernels, "bdist_wheel": BdistWheel})
