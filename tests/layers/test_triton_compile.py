"""Every GPU kernel compiles for Hopper at the sizes of a real model, without a GPU, and fits its resources."""

import json
import os
import subprocess
import sys

import pytest

# Operations whose inner loops must keep everything in registers.
NO_SPILLS = {"linear (wo_b)", "project", "experts_forward", "experts (fp8)", "experts (fp4)", "scaled_linear (wo_b)"}
NO_SPILLS |= {"attend (csa)", "attend (hca)", "hc_pre", "hc_post", "pool_windows (hca)", "pool_windows (csa)"}
NO_SPILLS |= {"attend (csa, fp8 keys)", "attend (hca, fp8 keys)", "markov_sample", "reject_drafts"}
NO_SPILLS |= {"attend_block (mla)", "attend_block (gqa)", "merge (mla)", "route_grouped"}


@pytest.mark.timeout(900)  # half a minute of work, but on a busy machine
def test_kernels_compile_for_hopper(tmp_path):
    """In a process of its own: where kernels are interpreted, they are not compiled."""
    pytest.importorskip("triton", reason="without triton there is nothing to compile")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-P", "-m", "dspark.runtime", "bench", "kernels", "--compile", "--rows", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rows_64"]
    assert NO_SPILLS <= found.keys() and all(found[name] for name in NO_SPILLS - {"project"})
    for operation, kernels in found.items():
        for kernel in kernels:
            assert kernel["shared"] <= 227 << 10 and kernel["registers"] <= 255, (operation, kernel)
            assert kernel["cubin_bytes"] > 1000
            assert operation not in NO_SPILLS or kernel["spilled"] == 0, (operation, kernel)
    for operation in ("linear (wo_b)", "scaled_linear (wo_b)"):
        assert any(kernel["wgmma"] for kernel in found[operation]), operation
