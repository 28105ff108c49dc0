"""The boundary of the package: nothing that it stands on brings megatron-core in."""

import subprocess
import sys


def test_importing_it_does_not_import_megatron_core():
    code = (
        "import sys, mindspeed_fsdp, mindspeed_models.families, mindspeed_runtime.config, mindspeed_parallel.layout; "
    )
    code += "sys.exit(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
