"""The arguments of the scan under the names and in the layouts of the mamba-ssm package: time last. What is wrong with a call is
said in these."""

from dataclasses import replace

from bridge.ops.selective_scan.op import selective_scan
from bridge.signature import Signature

TIME_LAST = replace(
    selective_scan,
    name="selective_scan_fn",
    signature=Signature.parse(
        "u: b d t, delta: b d t, A: d n, B: b n t or b g n t or d n, C: b n t or b g n t or d n, D?: d, z?: b d t, delta_bias?: d "
        "-> y: b d t like u, last_state?: b d n wide u"
    ),
)
