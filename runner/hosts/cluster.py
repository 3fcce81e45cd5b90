"""The hosts of an existing cluster: examined before the job, and watched while it runs.

A thread asks Ray for its nodes, examines new ones and plans replicas on them, which the driver starts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from outrider.runner.hosts import ray_nodes as nodes
from outrider.runner.hosts.examination import Examinations, Unfit
from outrider.runner.hosts.head_watch import Head
from outrider.runner.hosts.host_report import (
    HostReport,
    about_open_folder,
    answer_sign_of_life,
    own_versions,
    probe_pins,
    report_host,
)
from outrider.runner.hosts.host_selection import RayNode, chosen_kind, numeric_kind, offered, refusals
from outrider.runner.hosts.worker_errors import explain
from outrider.runner.planning.placement import Plan, plan
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate, booked
from outrider.runner.planning.topology import Topology
from outrider.runner.planning.units import spared_core
from outrider.workers.errors import CoresHeldError, JobError, PlacementError
from outrider.workers.machine.core_leases import describe
from outrider.workers.machine.pinning import Launch, Pin

POLL_SECONDS = 2.0
# How long one step of the watch waits for answers of nodes that are being examined.
ANSWERS_SECONDS = 1.0
# After this time a host without a free core is asked again.
LOOK_AGAIN_SECONDS = 5.0


def warn_of_open_folders(ray_nodes: Sequence[RayNode], say: Callable[[str], None]) -> None:
    for ray_node in ray_nodes:
        if ray_node.report.open_folder:
            what, mend = about_open_folder(ray_node.report.open_folder)
            say(f"note: {ray_node.name}: {what}: {mend}")


class ClusterHosts:
    """The ``Hosts`` of a driver on a cluster. ``models``: by name, the model's directory and digest on the driver's host.

    ``request_for_cores`` makes the placement request for a host of this many cores (the layout may depend on them).
    """

    def __init__(
        self,
        replica_template: ReplicaTemplate,
        sizes: ModelSizes,
        replicas: int | None,
        request_for_cores: Callable[[int], PlacementRequest],
        models: Mapping[str, tuple[str, str]],
        kept_instruction_set: str | None,
        say: Callable[[str], None],
        head: Head,
    ) -> None:
        self._replica_template = replica_template
        self._sizes = sizes
        self._replicas = replicas
        self._request_for_cores = request_for_cores
        self._models = models
        self._kept_instruction_set = kept_instruction_set
        self._say = say
        self._head = head
        self._own = nodes.own()
        self._versions = own_versions()
        directories = {name: path for name, (path, _) in models.items()}
        self._examinations = Examinations(directories, replica_template.share_cores, self._versions)
        self._numeric_kind: tuple[str, ...] = ()
        self._share = 1
        self._ray_nodes: dict[str, RayNode] = {}
        self._not_used: set[str] = set()
        # Nodes that were noted as not answering.
        self._silent: set[str] = set()
        # When Ray nodes were last asked who holds their cores.
        self._looked_at: dict[str, float] = {}
        # By Ray node: the plans of this job's replicas on it (empty if all of them have lost their cores).
        self._plans: dict[str, list[ReplicaPlan]] = {}
        # By Ray node: the replicas that have lost their cores to another run, and wait for cores.
        self._waiting: Counter[str] = Counter()
        # By Ray node: the core that its first plan left to Ray and the driver; "" if none.
        self._spared: dict[str, str] = {}
        # Notes that were printed; plans are made repeatedly.
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        self._news: SimpleQueue[str | ReplicaPlan] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)

    # The interface for the driver (``Hosts``)

    def lost(self) -> str | None:
        return self._head.lost()

    def new_replica_plans(self, unplaced: int) -> list[ReplicaPlan]:
        found: list[ReplicaPlan] = []
        # Actors cannot be started while the head does not answer.
        while not self._head.silent:
            try:
                news = self._news.get_nowait()
            except Empty:
                break
            if isinstance(news, str):
                self._say(news)
            else:
                found.append(news)
        return found

    def gone(self, plan: ReplicaPlan) -> bool:
        # Without the head it cannot be known; the host then counts as gone.
        silent = self._head.silent or not self._head.answers()
        return silent or not any(node["NodeID"] == plan.target.node for node in nodes.alive())

    def sign_of_life(self, plan: ReplicaPlan) -> Any:
        return nodes.start(answer_sign_of_life, str(plan.target.node))

    def release(self, plan: ReplicaPlan) -> None:
        with self._lock:
            node = str(plan.target.node)
            held = next((each for each in self._plans.get(node, []) if each.is_where(plan)), None)
            if held is not None:
                self._plans[node].remove(held)
                self._waiting[node] += 1

    def host(self, plan: ReplicaPlan) -> str:
        with self._lock:
            ray_node = self._ray_nodes.get(str(plan.target.node))
        return ray_node.name if ray_node is not None else str(plan.target.node)[:8]

    # Before the job

    def open(self, seconds: float) -> list[ReplicaPlan]:
        """Plan replicas on the present hosts; if some cannot take part, one error lists them all."""
        offering = nodes.offering(nodes.alive())
        if not offering:
            raise JobError(
                "no host of this cluster offers cores: start Ray on each with "
                '--resources="$(outrider topology --ray-resources)"'
            )
        ray_nodes, unfit = self._examine(offering)
        if unfit:
            listed = sorted(f"  {each.name} {each.why}" for each in unfit)
            raise JobError(f"{len(unfit)} of {len(offering)} hosts cannot take part in this job: see above", listed)
        if not ray_nodes:
            raise JobError("all hosts of this cluster that offer cores have left; the job has not begun")
        target = self._replica_template.target
        self._numeric_kind = chosen_kind(ray_nodes, target.engine, target.precision, self._kept_instruction_set)
        warn_of_open_folders(ray_nodes, self._say)
        self._admit(ray_nodes, self._say)
        self._share = -(-(self._replicas or 1) // len(self._ray_nodes))
        deadline = time.monotonic() + seconds
        said = ""
        while True:
            try:
                return self._plan_replicas(list(self._ray_nodes.values()), self._replicas, self._say)
            except PlacementError as refusal:
                held = {
                    name: holder for ray_node in self._ray_nodes.values() for name, holder in ray_node.report.held.items()
                }
                if not held:
                    raise
                waiting = describe(held.values())
                if time.monotonic() >= deadline:
                    raise CoresHeldError(f"{waiting}; without them: {refusal}") from None
                if waiting != said:
                    self._say(f"waiting: {waiting}; {refusal}")
                    said = waiting
            time.sleep(POLL_SECONDS)
            self._check_head()
            if self._head.answers():
                self._refresh(list(self._ray_nodes.values()))

    def _examine(self, offering: Sequence[Mapping[str, Any]]) -> tuple[list[RayNode], list[Unfit]]:
        """Examine all nodes; without a deadline, since a host may have to read its weights."""
        found: list[RayNode | Unfit] = []
        self._examinations.begin(offering)
        while self._examinations.under_way:
            found += self._examinations.step(POLL_SECONDS, self._say)
            found += self._examinations.drop_silent()
            self._check_head()
        living = {node["NodeID"] for node in nodes.alive()}
        for each in found:
            if each.id not in living:
                self._say(f"{each.name} has left")
        return self._judge([each for each in found if each.id in living])

    def _check_head(self) -> None:
        if (why := self._head.lost()) is not None:
            raise JobError(f"{why}; the job has not begun")

    def watch(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        there = self._head.lost() is None and self._head.answers()
        self._thread.join(nodes.ANSWER_SECONDS if there else 0.0)

    # While the job runs, in the watching thread

    def _watch(self) -> None:
        said = ""
        while not self._closed.wait(POLL_SECONDS):
            if not self._head.answers():
                continue
            try:
                self._step()
            except Exception as error:  # the job goes on with the hosts that it has
                if (trouble := f"note: the hosts cannot be watched: {explain(error)}") != said:
                    self._news.put(trouble)
                    said = trouble

    def _step(self) -> None:
        living = nodes.alive()
        if self._own not in {node["NodeID"] for node in living}:
            # Our own raylet hangs, and the head has given it up. (One that has ended is noticed sooner, by its port.)
            self._head.cut_off()
            return
        offering = nodes.offering(living)
        ids = {node["NodeID"] for node in offering}
        with self._lock:
            left = [ray_node for node, ray_node in self._ray_nodes.items() if node not in ids]
            for ray_node in left:
                # The driver learns of it from the futures of the node's actors, and releases their plans.
                del self._ray_nodes[ray_node.id]
        for ray_node in left:
            self._news.put(f"{ray_node.name} has left: its rows go elsewhere")
        known = self._ray_nodes.keys() | self._not_used | set(self._examinations.under_way)
        self._examinations.begin([node for node in offering if node["NodeID"] not in known])
        self._examinations.keep(ids)
        # In steps, so that other nodes are watched meanwhile: reading the weights may take an hour.
        ray_nodes, unfit = self._judge(self._examinations.step(ANSWERS_SECONDS, self._news.put))
        for each in self._examinations.drop_silent():  # the next step asks it again
            if each.id not in self._silent:
                self._silent.add(each.id)
                self._news.put(f"note: {each.name} {each.why}; it is asked again")
        warn_of_open_folders(ray_nodes, self._news.put)
        for each in unfit:
            self._not_used.add(each.id)
            self._news.put(f"note: {each.name} is not used: it {each.why}")
        self._admit(ray_nodes, self._news.put)
        self._plan_where_there_is_room()

    def _plan_where_there_is_room(self) -> None:
        """Plan replicas on Ray nodes that have none of this job's, or whose replicas wait for cores."""
        now = time.monotonic()
        with self._lock:
            used = sum(map(len, self._plans.values()))
            known = set(self._plans)
            room = {
                node: self._waiting[node] if self._plans.get(node) else self._share
                for node in self._ray_nodes
                if now - self._looked_at.get(node, 0.0) > LOOK_AGAIN_SECONDS
            }
            roomy = [self._ray_nodes[node] for node, replicas in room.items() if replicas]
        wanted = None if self._replicas is None else min(self._replicas - used, sum(room.values()))
        if not roomy or wanted == 0:
            return
        self._refresh(roomy)
        while wanted is None or wanted > 0:
            try:
                plans = self._plan_replicas(roomy, wanted, self._news.put)
            except PlacementError:
                if wanted is None:
                    return
                wanted -= 1
                continue
            for node in dict.fromkeys(str(each.target.node) for each in plans):
                if node not in known:
                    self._news.put(f"{self._ray_nodes[node].name} has joined the job")
            for each in plans:
                self._news.put(each)
            return

    # Steps of ``open`` and of the watching thread

    def _judge(self, found: Sequence[RayNode | Unfit]) -> tuple[list[RayNode], list[Unfit]]:
        """Divide examined nodes into those that can take part and those that cannot."""
        ray_nodes = [each for each in found if isinstance(each, RayNode)]
        unfit = [each for each in found if isinstance(each, Unfit)]
        digests = {name: digest for name, (_, digest) in self._models.items()}
        refused = refusals(ray_nodes, digests, self._versions)
        unfit += [Unfit(each.id, each.name, refused[each.id]) for each in ray_nodes if each.id in refused]
        return [each for each in ray_nodes if each.id not in refused], unfit

    def _refresh(self, ray_nodes: Sequence[RayNode]) -> None:
        """Update who holds which cores, for all Ray nodes of the hosts asked."""
        answers = nodes.ask(report_host, {ray_node.id: (self._replica_template.share_cores,) for ray_node in ray_nodes})
        held = {}
        for ray_node in ray_nodes:
            self._looked_at[ray_node.id] = time.monotonic()
            if isinstance(answer := answers[ray_node.id], HostReport):
                held[answer.identity] = answer.held
        with self._lock:
            for node, ray_node in self._ray_nodes.items():
                if ray_node.report.identity in held:
                    report = replace(ray_node.report, held=held[ray_node.report.identity])
                    self._ray_nodes[node] = replace(ray_node, report=report)

    def _admit(self, ray_nodes: Sequence[RayNode], say: Callable[[str], None]) -> None:
        """Use the nodes of the job's numeric kind; note the others."""
        target = self._replica_template.target
        for ray_node in ray_nodes:
            kind = numeric_kind(ray_node.report, target.engine, target.precision)
            if kind == self._numeric_kind:
                with self._lock:
                    self._ray_nodes[ray_node.id] = ray_node
                continue
            self._not_used.add(ray_node.id)
            say(
                f"note: {ray_node.name} is not used, since its results might not be bit-identical: it has "
                f"{', '.join(kind)}, "
                f"this job {', '.join(self._numeric_kind)} (OUTRIDER_ISA in Ray's environment makes hosts alike)"
            )

    def _plan_replicas(
        self, ray_nodes: Sequence[RayNode], replicas: int | None, say: Callable[[str], None]
    ) -> list[ReplicaPlan]:
        """Plan on the free cores of these Ray nodes, probe the launch commands there, and keep the plans."""
        wide = [host for host in self._free_machines(ray_nodes) if host.usable_cores]
        if not wide:
            raise PlacementError("no host has a free core")
        first = {host.host: spared_core(host) for host in wide if host.planned_cores is None}
        self._spared |= {node: "" if core is None else str(core.identity) for node, core in first.items()}
        made: list[Plan] = []
        refused: list[PlacementError] = []
        if replicas is None:
            taken: dict[str, Counter[int]] = {host.machine: Counter() for host in wide}
            for host in wide:
                request = self._request_for_cores(len(host.usable_cores))
                request = replace(request, devices_left=host.host in self._plans)
                try:
                    made.append(plan([host.less(taken[host.machine])], self._sizes, request))
                    for actor in made[-1].actors:
                        taken[host.machine].update(actor.memory)
                except PlacementError as error:
                    refused.append(error)
        else:
            narrowest = min(len(host.usable_cores) for host in wide)
            request = self._request_for_cores(narrowest * len(wide) if replicas > len(wide) else narrowest * replicas)
            again = any(host.host in self._plans for host in wide)
            made.append(plan(wide, self._sizes, replace(request, replicas=replicas, devices_left=again)))
        self._note(made, wide, say)
        if not made:
            raise refused[0]
        launches = self._tried(made)
        paths = {
            ray_node.id: {path: ray_node.report.models[name].path for name, (path, _) in self._models.items()}
            for ray_node in self._ray_nodes.values()
        }
        plans: list[ReplicaPlan] = []
        for one in made:
            found = self._replica_template.replicas(one, lambda node, pin: launches[node, pin], paths)
            node = str(found[0].target.node)
            # Without --replicas a Ray node has as many replicas as its first plan gave it.
            plans += found[: self._waiting[node]] if replicas is None and self._plans.get(node) else found
        with self._lock:
            for each in plans:
                node = str(each.target.node)
                self._plans.setdefault(node, []).append(each)
                self._waiting[node] = max(0, self._waiting[node] - 1)
        return plans

    def _free_machines(self, ray_nodes: Sequence[RayNode]) -> list[Topology]:
        """These Ray nodes' machines without the cores and memory of this job's replicas and of other runs."""
        share = self._replica_template.share_cores
        with self._lock:
            everywhere = list(self._ray_nodes.values())
            plans = {node: list(each) for node, each in self._plans.items()}
        taken = {node: {lease for each in planned for lease in each.leases} for node, planned in plans.items()}
        # Ray nodes on one host share its memory.
        memory: dict[str, Counter[int]] = {}
        for ray_node in everywhere:
            memory.setdefault(ray_node.report.identity, Counter()).update(booked(plans.get(ray_node.id, ())))
        identities = {ray_node.id: ray_node.report.identity for ray_node in everywhere}
        wanted = {ray_node.id for ray_node in ray_nodes}
        found = []
        for host in offered(everywhere, taken, share):
            if host.host not in wanted:
                continue
            host = replace(host.less(memory[identities[host.host]]), machine=identities[host.host])
            if plans.get(host.host):
                planned_cores = 0 if share else sum(lease.isdecimal() for lease in taken[host.host])
                host = replace(host.without({self._spared[host.host]}), planned_cores=planned_cores)
            found.append(host)
        return found

    def _note(self, made: Sequence[Plan], wide: Sequence[Topology], say: Callable[[str], None]) -> None:
        """Print, once each, the plans' notes, and which Ray nodes could not be used even with all of their cores free."""
        notes = [f"note: {note}" for one in made for note in one.notes]
        used = {actor.host for one in made for actor in one.actors}
        for ray_node in (self._ray_nodes[host.host] for host in wide if host.host not in used):
            report = replace(ray_node.report, held={})
            [whole] = offered([replace(ray_node, report=report)], {}, share=True)
            try:
                plan([whole], self._sizes, replace(self._request_for_cores(len(whole.usable_cores)), replicas=None))
            except PlacementError as error:
                notes.append(f"note: {ray_node.name} is not used: {error}")
        for note in dict.fromkeys(notes):
            if note not in self._noted:
                self._noted.add(note)
                say(note)

    def _tried(self, made: Sequence[Plan]) -> dict[tuple[str, Pin], Launch]:
        pins: dict[str, list[Pin]] = {}
        for one in made:
            for actor in one.actors:
                pins.setdefault(actor.host, []).append(actor.pin)
        answers = nodes.ask(probe_pins, {node: (each,) for node, each in pins.items()})
        for node, answer in answers.items():
            if not isinstance(answer, list):
                raise PlacementError(f"{self._ray_nodes[node].name} cannot start a process: {answer}")
        return {(node, pin): launch for node, each in pins.items() for pin, launch in zip(each, answers[node], strict=True)}


@contextmanager
def cluster(hosts: ClusterHosts, seconds: float) -> Iterator[tuple[ClusterHosts, list[ReplicaPlan]]]:
    plans = hosts.open(seconds)
    hosts.watch()
    try:
        yield hosts, plans
    finally:
        hosts.close()
