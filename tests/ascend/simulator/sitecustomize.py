"""With this folder on PYTHONPATH and FAKE_CANN_BUILD set, every Python process finds an Ascend: a simulated one."""

import os

from fake_cann import load

if os.environ.get(load.FOLDER):
    load.install()
