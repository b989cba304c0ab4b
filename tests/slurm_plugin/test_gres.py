"""Everything that Slurm prints of GRES is read as what it says: a printer written after its source, and our parser.

The printer follows `_build_node_gres_str`, `_node_gres_used`, `gres_ctld_job_build_details` and
`assoc_mgr_make_tres_str_from_array` of the three releases, with their faults: `(null)` for a type, and lists of devices
that are cut where a buffer ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.model import Gres, Job, Node, total
from hetstream.slurm_plugin.client.slurm_units import known_gres, parse_gres
from hetstream.slurm_plugin.insight.node_table import shape_of
from hetstream.slurm_plugin.packing.observe import _in_use

RELEASES = ("22.05", "24.11", "26.05")
SUFFIXES = "KMGTP"


@dataclass(frozen=True)
class Record:
    """A line of gres.conf, of one device.

    Attributes:
        count: of a shared one, its parts; of others 1.
        sockets: near it; None: no Cores=.
        used: of its parts, by jobs.
        taken: a whole job has it, of a shared one as the GPU that it is.
    """

    type: str | None
    count: int
    sockets: frozenset[int] | None
    used: int
    taken: bool = False


@dataclass(frozen=True)
class Resource:
    """What slurmctld knows of one GRES of a node.

    Attributes:
        records: of each device; none where only counts are known, as without Cores=.
        counts: then, of each type what there is and what is in use; None for no type.
        no_consume: jobs take nothing away.
    """

    name: str
    records: tuple[Record, ...]
    counts: tuple[tuple[str | None, int, int], ...]
    no_consume: bool

    @property
    def is_shared(self) -> bool:
        return self.name in ("shard", "mps")

    def groups(self) -> list[list[tuple[int, Record]]]:
        """Devices by type, in the order of the first of each."""
        found: dict[str | None, list[tuple[int, Record]]] = {}
        for index, record in enumerate(self.records):
            found.setdefault(record.type, []).append((index, record))
        return list(found.values())


def bit_fmt(numbers: Sequence[int], size: int) -> str:
    """As snprintf has it: nothing is written beyond the buffer."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    ranges = (f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return ",".join(ranges)[: size - 1]


def suffixed(count: int) -> str:
    power = 0
    while count and count % 1024 == 0 and power < 5:
        count, power = count // 1024, power + 1
    return f"{count}{SUFFIXES[power - 1] if power else ''}"


def has(resources: Sequence[Resource], release: str) -> str:
    """Gres= of a node that has registered."""
    printed = []
    for gres in resources:
        flag = ":no_consume" if gres.no_consume and release != "22.05" else ""
        for group in gres.groups():
            first = group[0][1]
            sockets = [record.sockets for _, record in group if record.sockets is not None]
            near = frozenset().union(*sockets)
            where = f"(S:{bit_fmt(sorted(near), 64)})" if near else ""
            kind = f":{first.type}" if first.type else ""
            count = sum(record.count for _, record in group)
            printed.append(f"{gres.name}{kind}{flag}:{suffixed(count)}{where}")
        for kind_name, count, _ in () if gres.records else gres.counts:
            kind = f":{kind_name}" if kind_name else ""
            printed.append(f"{gres.name}{kind}{flag}:{suffixed(count)}")
    return ",".join(printed) or "(null)"


def in_use(resources: Sequence[Resource], release: str) -> str:
    """GresUsed=."""
    printed = []
    for gres in resources:
        for group in [] if gres.no_consume else gres.groups():
            kind = group[0][1].type
            shown = f":{kind}" if kind else "" if release == "26.05" else ":(null)"
            if gres.is_shared and release != "22.05":
                note = ",".join(
                    f"-/{record.count}" if release == "26.05" and record.taken and not record.used
                    else f"{record.used}/{record.count}"
                    for _, record in group
                )  # fmt: skip
                count = sum(record.used for _, record in group)
            else:
                taken = [index for index, record in group if record.used]
                note, count = f"IDX:{bit_fmt(taken, 64)}" if taken else "IDX:N/A", len(taken)
            printed.append(f"{gres.name}{shown}:{count}({note})")
        if gres.no_consume or not gres.records:
            kinds = gres.counts or [(record[0][1].type, 0, 0) for record in gres.groups()]
            printed += [
                f"{gres.name}{f':{kind}' if kind else ''}:{0 if gres.no_consume else used}" for kind, _, used in kinds
            ]
    return ",".join(printed)


def details(resources: Sequence[Resource], release: str) -> str:
    """GRES= of one node of a job that has all that is in use."""
    printed = []
    for gres in resources:
        for group in gres.groups():
            name = f"{gres.name}:{group[0][1].type}" if group[0][1].type else gres.name
            taken = [index for index, record in group if record.used]
            count = 0 if gres.no_consume else sum(record.used for _, record in group)
            if gres.is_shared and release != "22.05":
                shares = ",".join(
                    f"{record.used if record.type == group[0][1].type else 0}/{record.count}" for record in gres.records
                )
                printed.append(f"{name}:{count}({shares})")
            else:
                printed.append(f"{name}:{count}(IDX:{bit_fmt(taken, 128)})")
        for kind, _, used in () if gres.records else gres.counts:
            if used:
                printed.append(f"{gres.name}{f':{kind}' if kind else ''}(CNT:{0 if gres.no_consume else used})")
    return ",".join(printed)


def amounts(resources: Sequence[Resource], what: str) -> Counter[tuple[str, str]]:
    """The truth: of each name and type, `has` or `used`."""
    found = Counter[tuple[str, str]]()
    for gres in resources:
        for record in gres.records:
            found[gres.name, record.type or ""] += record.count if what == "has" else record.used
        for kind, count, used in () if gres.records else gres.counts:
            found[gres.name, kind or ""] += count if what == "has" else used
        if gres.no_consume and what == "used":
            for key in [key for key in found if key[0] == gres.name]:
                found[key] = 0
    return +found


def tres(resources: Sequence[Resource], what: str, typed: bool) -> str:
    """CfgTRES= or AllocTRES=: of each accounted name its sum, and of each type, too, if those are accounted for."""
    sums = Counter[str]()
    for (name, kind), count in amounts(resources, what).items():
        sums[f"gres/{name}"] += count
        if typed and kind:
            sums[f"gres/{name}:{kind}"] += count
    gres = [f"{name}={count}" for name, count in sums.items() if count]
    return ",".join(["cpu=3", "mem=1.50G", *gres, "billing=3", "license/fluent=2", "fs/disk=10"])


def counted(found: Sequence[Gres]) -> Counter[tuple[str, str]]:
    amount = Counter[tuple[str, str]]()
    for gres in found:
        amount[gres.name, gres.type] += gres.count
    return +amount


# Types as sites and AutoDetect=nvml have them, with profiles of MIG; some look like counts.
TYPES = st.none() | st.sampled_from(
    ("a100", "h200", "1080", "nvidia_h100_80gb_hbm3_3g.40gb", "1g.10gb+me", "tesla-v100", "2g")
)
SOCKETS = st.none() | st.frozensets(st.integers(0, 7))


@st.composite
def gres_of_nodes(draw: st.DrawFn, name: str) -> Resource:
    kinds = draw(st.sampled_from([[None], ["a100"], ["a100", "v100"], [draw(TYPES)]]))
    no_consume = draw(st.integers(0, 9)) == 0
    if draw(st.booleans()):
        parts = st.integers(1, 8) if name in ("shard", "mps") else st.just(1)
        records = []
        for _ in range(draw(st.integers(1, 48))):
            count = draw(parts)
            record = Record(draw(st.sampled_from(kinds)), count, draw(SOCKETS), draw(st.integers(0, count)))
            records.append(replace(record, taken=not record.used and draw(st.booleans())))
        return Resource(name, tuple(records), (), no_consume)
    counts = []
    for kind in kinds:
        count = draw(st.integers(1, 64) | st.sampled_from([1024, 2048, 3 * 1024**2, 5 * 1024**3, 2 * 1024**4]))
        counts.append((kind, count, draw(st.integers(0, count))))
    return Resource(name, (), tuple(counts), no_consume)


NODES = st.lists(st.sampled_from(("gpu", "shard", "mps", "bandwidth", "tmpfs")), unique=True).flatmap(
    lambda names: st.tuples(*(gres_of_nodes(name) for name in names))
)


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@given(NODES, st.sampled_from(RELEASES))
def test_what_a_node_has_is_read_as_printed(resources: tuple[Resource, ...], release: str) -> None:
    assert counted(parse_gres(has(resources, release))) == amounts(resources, "has")


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@given(NODES, st.sampled_from(RELEASES))
def test_what_is_in_use_is_read_as_printed(resources: tuple[Resource, ...], release: str) -> None:
    found = parse_text.in_use(parse_gres(in_use(resources, release)))
    truth = amounts(resources, "used")
    if release == "22.05":  # of what is shared it counts the devices
        for gres in resources:
            for group in gres.groups() if gres.is_shared and not gres.no_consume else ():
                key = gres.name, group[0][1].type or ""
                truth[key] = sum(record.used > 0 for _, record in group)
    assert counted(found) == +truth
    for gres in found:
        (resource,) = (resource for resource in resources if resource.name == gres.name)
        devices = [(index, record) for index, record in enumerate(resource.records) if (record.type or "") == gres.type]
        taken = [
            place if resource.is_shared and release != "22.05" else index
            for place, (index, record) in enumerate(devices)
            if record.used
        ]
        # A list that was cut says nothing, and never another device.
        assert list(gres.indices) in ([], taken)
        assert list(gres.indices) == taken or len(bit_fmt(taken, 999)) >= 63 or resource.no_consume


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@given(NODES, st.sampled_from(RELEASES))
def test_what_a_job_has_on_a_node_is_read_as_printed(resources: tuple[Resource, ...], release: str) -> None:
    assert counted(parse_gres(details(resources, release))) == amounts(resources, "used")


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@given(NODES, st.booleans())
def test_gres_among_trackable_resources_are_read_as_printed(resources: tuple[Resource, ...], typed: bool) -> None:
    text = tres(resources, "used", typed)
    whole = Counter[str]()
    for (name, _), count in amounts(resources, "used").items():
        whole[name] += count
    found = parse_gres(text)
    assert {gres.name: gres.count for gres in found if not gres.type} == whole
    typed_truth = {key: count for key, count in amounts(resources, "used").items() if key[1]} if typed else {}
    assert {(gres.name, gres.type): gres.count for gres in found if gres.type} == typed_truth
    assert parse_text.gpus_allocated(tres(resources, "has", typed), text) in (None, whole["gpu"])


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@given(
    st.sampled_from(("gres:", "gres/")), st.sampled_from(("gpu", "shard")),
    TYPES.filter(lambda kind: kind not in ("1080", "2g")), st.none() | st.integers(1, 64), st.sampled_from(":="),
)  # fmt: skip
def test_requests_are_read_as_printed(prefix: str, name: str, kind: str | None, count: int | None, sep: str) -> None:
    text = f"{prefix}{name}{f':{kind}' if kind else ''}{f'{sep}{count}' if count else ''}"
    assert counted(parse_gres(f"cpu:8,{text},license/x=2")) == {(name, kind or ""): count or 1}


@given(st.text(st.sampled_from("gpushard:=/(),0123456789SIDXCNT-.K ")))
def test_other_text_is_read_or_refused(text: str) -> None:
    with suppress(ValueError):
        assert all(gres.name and gres.count >= 0 for gres in parse_gres(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:(null):3(IDX:0-2)", [Gres("gpu", "", 3, (0, 1, 2))]),
        ("gpu:(null):0(IDX:N/A)", [Gres("gpu", "", 0)]),
        ("shard:(null):3(3/8,0/8)", [Gres("shard", "", 3, (0,))]),
        ("shard:3((null)),gpu:1(IDX:0,2)", [Gres("shard", "", 3), Gres("gpu", "", 1, (0, 2))]),
        ("gpu:h200:no_consume:4(S:0-1)", [Gres("gpu", "h200", 4)]),
        ("bandwidth:lustre:no_consume:4G", [Gres("bandwidth", "lustre", 4 * 1024**3)]),
        ("tmpfs:2T,disk:5TB,cache:1P", [
            Gres("tmpfs", "", 2 * 1024**4), Gres("disk", "", 5 * 1000**4), Gres("cache", "", 1024**5)
        ]),
        ("gpu:1080(CNT:2)", [Gres("gpu", "1080", 2)]),
        ("cpu:8,mem=1.50G,license/fluent:2,bb/dw=1.5G,gres/gpu:a100=2", [Gres("gpu", "a100", 2)]),
        ("gpu=2", [Gres("gpu", "", 2)]),
    ],
)  # fmt: skip
def test_forms_that_were_seen(text: str, expected: list[Gres]) -> None:
    assert list(parse_gres(text)) == expected


@pytest.mark.shows("GRES of every form that Slurm prints are read back; text of another form is an error")
@pytest.mark.parametrize("text", ["gpu:", "gres/gpu=", "gpu:3(FOO:1)", "gpu:3(IDX:0-", "gpu:2(3/4,x)", "gres/gpu=-1"])
def test_a_form_that_slurm_does_not_print_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GRES"):
        parse_gres(text)


@pytest.mark.parametrize(
    "devices", ["0-999999999", "0-1024", ",".join(["0-999999999"] * 50_000), ",".join(["0-1023"] * 50_000)]
)
def test_a_list_of_devices_that_no_node_has_is_not_written_out(devices: str) -> None:
    """A job's name can look like a record of Slurm's, and its text is its user's."""
    item = f"gpu:1(IDX:{devices})"
    with pytest.raises(ValueError, match="more than 1024 devices"):
        parse_gres(item)
    assert known_gres(item)[0] == (Gres("gpu", "", 1),)
    assert parse_gres("gpu:1024(IDX:0-1023)")[0].indices == tuple(range(1024))


def test_a_list_of_devices_that_a_buffer_cuts_names_none() -> None:
    taken = list(range(0, 48, 2))
    listed = bit_fmt(taken, 64)
    assert len(listed) == 63
    (gres,) = parse_gres(f"gpu:a100:{len(taken)}(IDX:{listed})")
    assert (gres.count, gres.indices) == (24, ())


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"tres-alloc": "cpu=8,node=1,gres/gpu=4"}, 4),  # --ntasks-per-gpu=2 -n8: nothing else says so
        ({"tres-alloc": "cpu=2,node=1,gres/gpu=2", "tres-per-socket": "gres/gpu:1"}, 2),
        ({"tres-alloc": "cpu=2,node=1", "tres-per-socket": "gres:gpu:1"}, 1),  # without accounting: as far as is said
        ({"tres-alloc": "cpu=1,node=1,gres/gpu=1", "tres-per-node": "gres:gpu:a100=2"}, 1),  # as 22.05 understands it
        ({"tres-alloc": "cpu=1,node=1", "tres-per-task": "cpu=1,gres/gpu=1", "NumTasks": "3"}, 3),
    ],
)
def test_gpus_that_a_pending_job_asks_for_are_as_slurm_counts_them(fields: dict[str, str], gpus: int) -> None:
    row = dict.fromkeys(parse_text.JOB_FIELDS, "N/A") | {
        "JobID": "7", "UserName": "alice", "Partition": "gpu", "State": "PENDING", "Reason": "Resources",
        "NumCPUs": "1", "PriorityLong": "1", "TimeLimit": "UNLIMITED", "NodeList": "",
    }  # fmt: skip
    end, last = parse_text.FIELD_END, parse_text.RECORD_END
    text = end.join((row | fields)[name] for name in parse_text.JOB_FIELDS) + last
    (job,) = parse_text.parse_jobs(text)
    assert (job.count("gpu"), job.gpus, shape_of(job).gpus) == (gpus, gpus, gpus)


def node(gres: str, used: str, allocated: int | None = None) -> Node:
    return Node(
        "g1", frozenset({"MIXED"}), ("gpu",), 16, 4, 64000, 1000, parse_gres(gres), parse_text.in_use(parse_gres(used)),
        gpus_allocated=allocated,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("used", "free"),
    [("gpu:(null):0(IDX:N/A)", 4), ("gpu:(null):3(IDX:0-2)", 1), ("gpu:(null):4(IDX:0-3)", 0), ("gpu:2(IDX:0-1)", 2)],
)
def test_untyped_gpus_with_cores_are_counted(used: str, free: int) -> None:
    assert node("gpu:4(S:0-1)", used).gpus_free() == free


@pytest.mark.shows("shards of a typed GPU count against that type")
@pytest.mark.parametrize(
    ("gres", "used", "free"),
    [
        # 22.05 says on how many devices, later ones how many parts of each
        ("gpu:a100:2,gpu:v100:2", "gpu:a100:0(IDX:N/A),gpu:v100:0(IDX:N/A),shard:a100:1(IDX:0)", (3, 1, 2)),
        ("gpu:a100:2,gpu:v100:2", "shard:a100:0(0/4,0/4),shard:v100:5(4/4,1/4)", (2, 2, 0)),
        ("gpu:a100:2,gpu:v100:2", "gpu:a100:1(IDX:1),shard:a100:3(3/4,-/4)", (2, 0, 2)),
        ("gpu:a100:2,gpu:v100:2", "mps:v100:50(50/100,0/100)", (3, 2, 1)),
        ("gpu:a100:2,gpu:v100:2", "shard:(null):1(IDX:0)", (3, 1, 1)),  # it may be of either type
        ("gpu:a100:2", "shard:(null):3(3/4,0/4)", (1, 1, 0)),
        ("gpu:a100:2", "shard:2", (1, 1, 0)),
    ],
)
def test_shared_gpus_count_against_their_type(gres: str, used: str, free: tuple[int, int, int]) -> None:
    found = node(gres, used)
    assert (found.devices_free(), found.devices_free("a100"), found.devices_free("v100")) == free


@pytest.mark.parametrize(
    ("gres", "used", "allocated", "known"),
    [
        ("gpu:4(S:0-1)", "gpu:(null):2(IDX:0,2)", 2, {0, 2}),
        ("gpu:4,shard:16", "gpu:1(IDX:3),shard:5(4/4,1/4,0/4,-/4)", 1, {0, 1, 3}),
        # the parts of the second type are those of its devices, whichever these are
        ("gpu:a100:2,gpu:v100:2,shard:a100:8,shard:v100:8", "shard:v100:2(0/4,2/4)", 0, None),
        ("gpu:4(S:0-1)", "gpu:(null):0(IDX:N/A)", 2, None),
        ("gpu:4", "gpu:2", None, None),
    ],
)
def test_the_packer_knows_which_gpus_are_in_use_or_that_it_does_not(
    gres: str, used: str, allocated: int | None, known: set[int] | None
) -> None:
    assert _in_use(node(gres, used, allocated)) == known


@pytest.mark.shows("GPUs in use are counted by GresUsed and AllocTRES, and `doctor` says where they differ")
def test_of_two_counts_the_larger_is_in_use() -> None:
    assert node("gpu:4", "gpu:(null):0(IDX:N/A)", 3).gpus_free() == 1
    assert node("gpu:4", "gpu:(null):3(IDX:0-2)", 0).gpus_free() == 1
    mixed = node("gpu:a100:2,gpu:1g.10gb:2", "gpu:a100:0(IDX:N/A)", 1)
    assert (mixed.gpus_free(), mixed.devices_free("a100"), mixed.devices_free("1g.10gb")) == (1, 1, 1)


def test_untyped_gpus_beside_typed_ones_are_neither_lost_nor_counted_twice() -> None:
    found = node("gpu:2,gpu:a100:2", "gpu:(null):1(IDX:0),gpu:a100:1(IDX:2)")
    assert (found.gpus, found.devices(), found.gpus_free(), found.devices_free("a100")) == (4, 4, 2, 1)


@pytest.mark.shows("GPUs in use are counted by GresUsed and AllocTRES, and `doctor` says where they differ")
def test_both_counts_of_a_node_are_in_text_and_json() -> None:
    line = (
        "NodeName=g4 CPUAlloc=6 CPUTot=16 Gres=gpu:4(S:0-1) GresDrain=N/A GresUsed=gpu:(null):3(IDX:0-2) RealMemory=1 "
        "AllocMem=0 State=MIXED CfgTRES=cpu=16,mem=62.50G,billing=16,gres/gpu=4 AllocTRES=cpu=6,mem=6G,gres/gpu=2"
    )
    (text,) = parse_text.parse_nodes(line)
    (document,) = parse_json.parse_nodes(
        '{"nodes": [{"name": "g4", "state": "MIXED", "cpus": 16, "alloc_cpus": 6, "real_memory": 1, "alloc_memory": 0,'
        '"gres": "gpu:4(S:0-1)", "gres_used": "gpu:(null):3(IDX:0-2)", "tres": "cpu=16,gres/gpu=4",'
        '"tres_used": "cpu=6,gres/gpu=2"}]}'
    )
    for found in (text, document):
        assert (total(found.gres_used, "gpu"), found.gpus_allocated) == (3, 2)
    (unaccounted,) = parse_text.parse_nodes(line.replace(",gres/gpu=4", "").replace(",gres/gpu=2", ""))
    assert unaccounted.gpus_allocated is None


def test_a_request_for_any_number_of_tasks_is_counted_at_once() -> None:
    """With EnforcePartLimits=NO a job that no cluster could hold is in the queue of all."""
    plain = Job(1, "j", "u", ("gpu",), "PENDING", "Resources", 1, 1, 1, 1, 0)
    most, asked = 4_000_000_000, (Gres("gpu", "h200", 2),)
    for found in (
        replace(plain, gres_per_task=asked, num_tasks=most),
        replace(plain, gres_per_node=asked, num_nodes=most),
        replace(plain, gres_per_socket=asked, num_nodes=most),
    ):
        assert found.count("gpu") == found.gpus == 2 * most
        assert found.amounts("gpu") == (Gres("gpu", "h200", 2 * most),)
