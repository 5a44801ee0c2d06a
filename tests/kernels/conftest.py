"""Property tests here have no deadline: wall time says nothing on a machine that runs other things beside them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kernels", deadline=None, print_blob=True)
settings.load_profile("kernels")
