"""The audit: what it reads of compiled programs, by hand; and that gossip is hidden."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import quickstart
from jaxdec import nodes
from jaxdec.audit import audit, hlo, report, targets
from jaxdec.audit.schedule import Operation, Schedule, Transfer, predict, read
from jaxdec.config import ConfigError

# A step of a GPU of two hosts of two: all leaves in one permute, two products beside it, a loop of
# three products, and an all-reduce in another loop.
GPU = """HloModule step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  %e = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %fusion.1 = f32[4,4]{1,0} fusion(%e), kind=kCustom, calls=%wrapped
  ROOT %r = (s32[], f32[4,8]{1,0}) tuple(%t, %e)
}

%talks (u: (s32[], f32[10])) -> (s32[], f32[10]) {
  %u = (s32[], f32[10]{0}) parameter(0)
  %v = f32[10]{0} get-tuple-element(%u), index=1
  %all-reduce.1 = f32[10]{0} all-reduce(%v), replica_groups=[2,2]<=[4], to_apply=%sum
  ROOT %s = (s32[], f32[10]{0}) tuple(%u, %all-reduce.1)
}

%always (w: (s32[], f32[4,8])) -> pred[] {
  %w = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[4,8], y: bf16[10], z: (s32[], f32[10])) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0), metadata={op_name="a, calls=%no"}
  %y = bf16[10]{0} parameter(1)
  %z = (s32[], f32[10]{0}) parameter(2)
  %start = ((f32[4,8]{1,0}, /*index=1*/bf16[10]{0}), (f32[4,8]{1,0}, bf16[10]{0})) \
collective-permute-start(%x, %y), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  %gemm = (f32[4,4]{1,0}, s8[1000]{0}) custom-call(%x, %x), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %i = (s32[], f32[4,8]{1,0}) tuple(%x, %x)
  %while.1 = (s32[], f32[4,8]{1,0}) while(%i), condition=%always, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %done = (f32[4,8]{1,0}, bf16[10]{0}) collective-permute-done(%start)
  %while.2 = (s32[], f32[10]{0}) while(%z), condition=%always, body=%talks, \
backend_config={"known_trip_count":{"n":"2"}}
  ROOT %last = f32[4,8]{1,0} get-tuple-element(%done), index=0
}
"""
# A TPU's batched product: a convolution over a dilated batch. And a strided one with padding.
TPU = """HloModule step, is_scheduled=true

ENTRY %main (x: bf16[8,1024,64], y: bf16[8,64,512], z: f32[2,9,5,3]) -> f32[2,5,5,7] {
  %x = bf16[8,1024,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[8,64,512]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %z = f32[2,9,5,3]{3,2,1,0:T(8,128)} parameter(2)
  %k = f32[3,3,3,7]{3,2,1,0} constant({...})
  %batched = f32[8,1024,512]{2,1,0:T(8,128)} convolution(%x, %y), \
window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf, operand_precision={default,default}
  ROOT %padded = f32[2,5,5,7]{3,2,1,0} convolution(%z, %k), \
window={size=3x3 stride=2x1 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}
"""
CHIP = targets.Chip(flops=100.0, memory_rate=1e3, link_rate=1e9, network_rate=10.0, latency=0.5)


def test_a_gpus_module_is_read():
    module = hlo.Module(GPU)
    scheduled = list(module.scheduled())
    flops = {each.name: module.flops(name, each) for name, each in scheduled}
    assert flops["gemm"] == 2 * 4 * 4 * 8
    assert flops["while.1"] == 3 * 2 * 4 * 4 * 8
    assert sum(flops.values()) == 4 * 256
    kinds = [kind for _, each in scheduled if (kind := module.collective(each))]
    assert kinds == ["collective-permute", "all-reduce", "all-reduce"]
    start = module.computations["main"]["start"]
    assert sum(array.bytes for array in module.read("main", start)) == 4 * 8 * 4 + 10 * 2
    assert hlo.groups_of(start, 4) == [[0, 2], [2, 0], [1, 3], [3, 1]]
    assert hlo.groups_of(module.computations["talks"]["all-reduce.1"], 4) == [[0, 1], [2, 3]]


def test_a_tpus_convolutions_are_counted_without_padding():
    module = hlo.Module(TPU)
    found = {each.name: module.flops(name, each) for name, each in module.scheduled()}
    assert found["batched"] == 2 * 8 * 1024 * 512 * 64
    rows, columns = 2 + 3 + 3 + 3 + 2, 2 + 3 + 3 + 3 + 2
    assert found["padded"] == 2 * 2 * 7 * 3 * rows * columns


def test_a_librarys_convolution_is_the_forward_one_it_derives():
    line = (
        "%x = f32[2,4,4,3]{3,2,1,0} parameter(0)\n  %y = f32[2,4,4,7]{3,2,1,0} parameter(1)\n"
        "  ROOT %g = (f32[3,3,3,7]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 "
        'pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"'
    )
    module = hlo.Module(
        f"HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[]) -> f32[] {{\n  {line}\n}}"
    )
    found = sum(module.flops(name, each) for name, each in module.scheduled())
    assert found == 2 * 2 * 3 * 7 * (2 + 3 + 3 + 2) ** 2


def test_of_what_a_fusion_slices_the_slices_are_read():
    module = hlo.Module("""HloModule m, is_scheduled=true

%taken (p: f32[100], q: f32[10], i: s32[]) -> f32[10] {
  %q = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  %p = f32[100]{0} parameter(0)
  %b = f32[100]{0} bitcast(%p)
  %s = f32[10]{0} slice(%b), slice={[0:10]}
  %d = f32[10]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={10}
  %a = f32[10]{0} add(%s, %q)
  ROOT %r = f32[10]{0} add(%a, %d)
}

ENTRY %main (x: f32[100], y: f32[10], k: s32[]) -> f32[10] {
  %x = f32[100]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %k = s32[] parameter(2)
  ROOT %f = f32[10]{0} fusion(%x, %y, %k), kind=kLoop, calls=%taken
}
""")
    assert module.bytes_read("main", module.computations["main"]["f"]) == 4 * (2 * 10 + 10 + 1)


def test_what_is_not_scheduled_is_refused():
    with pytest.raises(ValueError, match="not the text of a scheduled module: 'HloModule x'"):
        hlo.Module("HloModule x\n")


def test_a_schedule_is_read():
    schedule = read(hlo.Module(GPU), nodes.make_mesh(node=2, model=2), hosts=[0, 0, 1, 1])
    permute, *reduces = schedule.transfers
    assert (permute.kind, permute.axes, permute.bytes) == ("collective-permute", ("node",), 148)
    assert (permute.device_bytes, permute.host_bytes) == (148, 2 * 148)
    assert [each.axes for each in reduces] == [("model",)] * 2
    assert [each.host_bytes for each in reduces] == [0.0] * 2
    assert [each.device_bytes for each in reduces] == [40.0] * 2
    assert schedule.gossip == [permute]
    assert schedule.share_in_flight([permute]) == 1.0
    assert schedule.share_in_flight(reduces) == 0.0
    assert schedule.spans_all_products([permute])
    assert not schedule.spans_all_products(reduces)


def _transfer(start, done, host_bytes=20.0, axes=("node",)):
    return Transfer("collective-permute", axes, 20, 20.0, host_bytes, start, done)


@pytest.mark.parametrize(
    ("transfers", "step", "exposed"),
    [
        ([], 3.0, 0.0),
        ([_transfer(0, 5)], 3.0, 0.0),  # 2.5 s beside 3 s
        ([_transfer(3, 5)], 4.5, 1.5),  # beside the last second
        ([_transfer(3, 3)], 5.5, 2.5),  # one operation, beside nothing
        ([_transfer(0, 5), _transfer(1, 6)], 5.0, 2.0),  # they share a link
        ([_transfer(3, 3, axes=("model",))], 5.5, 0.0),
        ([_transfer(0, 5), _transfer(1, 6, host_bytes=0.0)], 3.0, 0.0),  # inside hosts, at once
    ],
)
def test_a_replay_takes_the_time_worked_out_by_hand(transfers, step, exposed):
    none = Operation()
    operations = [none, none, Operation(200.0), none, Operation(50.0, 1e3), none, none]
    found = predict(Schedule(operations, transfers), CHIP)
    assert (found.step_s, found.exposed_s) == pytest.approx((step, exposed))
    assert found.compute_s == pytest.approx(3.0)
    assert sum(span.seconds for span in found.spans if span.lane == "compute") == pytest.approx(3)


def test_a_step_of_a_cpu_mesh_is_what_it_must_be():
    config = quickstart.get_config()
    config.model.hidden = (32,)
    found = audit(config, targets.find("cpu:8"))
    assert sorted(found.phases) == [0, 1, 2]
    size = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    batch = config.batch_size // 8
    for phase, compiled in found.phases.items():
        entry = report.to_json(found)["phases"][phase]
        assert entry["counts"]["other"] == {}
        assert set(entry["counts"]["gossip"]) == {"collective-permute"}
        assert entry["gossip_bytes"] == entry["host_bytes"] == entry["least_host_bytes"] == size
        # The first layer's input has no gradient.
        products = sum(operation.flops for operation in compiled.schedule.operations)
        assert products == 2 * batch * (2 * 64 * 32 + 3 * 32 * 10)
        assert entry["exposed_gossip_bytes"] == size  # XLA on CPU does not overlap
        assert entry["predicted"]["exposed_s"] > 0
    assert set(report.to_json(found)["allreduce"]["counts"]["gossip"]) == {"all-reduce"}
    assert report.timeline(found).axes[0].get_title(loc="left") == "phase 0"


def test_hosts_that_gossip_as_one_send_one_model():
    config = quickstart.get_config()
    config.topology.name = "alternating_exponential_ring"
    config.topology.local = config.mesh.local = 4
    config.model.hidden = (32,)
    eight = targets.find("cpu:8")
    target = dataclasses.replace(eight, hosts=(0,) * 4 + (1,) * 4)
    found = report.to_json(audit(config, target))["phases"]
    size = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    # Leaves are padded to a multiple of the replicas that share them.
    merging = [entry for entry in found if entry["least_host_bytes"]]
    assert [entry["least_host_bytes"] for entry in merging] == [size]
    for entry in merging:
        assert entry["host_bytes"] == pytest.approx(size, rel=2e-3)
        assert set(entry["counts"]["gossip"]) == {
            "reduce-scatter",
            "collective-permute",
            "all-gather",
        }


def test_devices_that_share_a_replica_are_no_gossip():
    config = quickstart.get_config()
    config.nodes = 4
    config.mesh.data = 2
    config.model.hidden = (32,)
    entry = report.to_json(audit(config, targets.find("cpu:8")))["phases"][0]
    assert set(entry["counts"]["other"]) == {"all-reduce"}
    axes = {each["axis"] for each in entry["collectives"]}
    assert axes == {"node", "data"}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="audit-tpu is not installed")
def test_gossip_is_hidden_on_a_tpu(tmp_path):
    """As the compiler schedules it; in so small a model the packing comes beside products."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxdec.audit", "--config=configs/quickstart.py"),
            *("--target=tpu:v5e:2x4", f"--json={tmp_path / 'audit.json'}"),
            *("--config.model.hidden=(256,256)", f"--timeline={tmp_path / 'audit.png'}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "audit.json").read_text())
    assert len(found["phases"]) == 3
    for entry in found["phases"]:
        assert entry["counts"]["gossip"].keys() == {"collective-permute"}
        assert entry["exposed_gossip_bytes"] == 0
        assert entry["flops_in_flight_share"] > 0.5
    assert (tmp_path / "audit.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu", "is unknown; write cuda:h100:HOSTSxDEVICES"),
        ("cpu:0", "is unknown; write"),
        ("cuda:h10:2x8", "no cuda 'h10' is known; did you mean h100"),
        ("cuda:h100:two", "'two' is no shape; write one such as 2x8"),
        ("cuda:h100:2x2x2", "write cuda:h100:HOSTSxDEVICES"),
        ("cpu:64", "JAX was started with 8 CPU devices; set JAX_NUM_CPU_DEVICES=64"),
    ],
)
def test_bad_targets_are_named(target, message):
    with pytest.raises(ConfigError, match=message):
        targets.find(target)


@pytest.mark.parametrize(
    ("target", "extra"), [("cuda:h100:2x8", "audit-cuda"), ("tpu:v5e:4x4", "audit-tpu")]
)
def test_a_missing_plug_in_is_named_with_its_extra(target, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"not installed; pip install 'jaxdec\[{extra}\]'"):
        targets.find(target)


def test_nodes_must_fit_the_target():
    config = quickstart.get_config()
    config.mesh.data = 2
    with pytest.raises(ConfigError, match=r"take 2 devices each, .* has 8; write --config.nodes=4"):
        audit(config, targets.find("cpu:8"))


def test_a_sharded_batch_keeps_its_rows():
    mesh = nodes.make_mesh(node=2, data=2, devices=jax.devices()[:4])
    x = jnp.arange(16.0).reshape(2, 8)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("node", "data")))
    total = nodes.on_mesh(lambda x: x.sum(), mesh, donate_argnums=())(placed)
    assert total.tolist() == [28.0, 92.0]
