"""What a deploy file may say: frozen settings with their defaults. ``config`` reads files."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster import config_tree
from cluster.config_security import AuthConfig, SecurityConfig

MAX_TIER_CHARS = 32
"""Of a tier's name."""
HEAD = "head"
"""Instead of an address: the head node's."""
DEFAULT_KV_TOKENS = 16384
DEFAULT_WINDOW_MS = 20.0
"""KV capacity of a worker for which the file names none."""


class Role(enum.Enum):
    """Which halves a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    __hash__ = object.__hash__  # placing looks workers up by it all the time


class Dtype(enum.Enum):
    """Element type of weights and KV; AUTO is bf16 where the device has it in hardware.

    FP16 is for KV anywhere, and for weights on a GPU.
    """

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Device(enum.Enum):
    """What a worker computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(enum.Enum):
    """How block bytes move between two workers.

    SHM needs both on one host; AUTO takes it for such links, and TORCH_DIST for all others.
    """

    LOOPBACK = "loopback"
    TORCH_DIST = "torch_dist"
    SHM = "shm"
    AUTO = "auto"


class Policy(enum.Enum):
    """The order in which waiting requests are placed."""

    FCFS = "fcfs"
    SJF = "sjf"
    """The least expected work first: prompt tokens that are not cached, and expected output."""
    PRIORITY = "priority"
    """The highest tier first."""


class Preemption(enum.Enum):
    """What happens where a sequence needs slots or blocks that others have."""

    OFF = "off"
    """Nothing: each has its prompt and max_tokens reserved before it starts."""
    RECOMPUTE = "recompute"
    """The youngest of the lowest tier gives them up, and is computed again later."""
    SWAP = "swap"
    """The same one gives them up, and its KV waits in CPU memory: nothing is computed again."""


class Batching(enum.Enum):
    """When a worker's batch takes new members."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    """When the last batch has ended to its last member, and nobody has come for 10 ms."""
    DYNAMIC = "dynamic"
    """As static, once the new batch is full or has collected for a window."""


class LocalPrefill(enum.Enum):
    """Whether decode workers prefill by themselves though there are prefill workers."""

    AUTO = "auto"
    """Short or well-cached prompts, where that is predicted to be cheaper."""
    ALWAYS = "always"
    NEVER = "never"


class Host(enum.Enum):
    """What runs the cluster: Ray, or one process for everything."""

    RAY = "ray"
    INLINE = "inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model the cluster serves."""

    path: str = "trial"
    """``trial`` (SmolLM2-135M-Instruct, fetched once), a folder, or a Hugging Face id."""
    name: str = ""
    """The name clients use; derived from ``path`` when empty."""
    max_model_len: int = 2048
    """Prompt and output tokens of one choice together; capped by the model's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Workers of one role on one kind of hardware."""

    name: str
    role: Role
    count: int = 1
    """Workers, where neither ``min`` nor ``max`` says otherwise."""
    min: int = 1
    """Workers at least, where there is a ``max``. 0 only beside a pool that serves the same."""
    max: int = 0
    """Workers at most, as the load asks for them; 0: there are ``count``, whatever the load."""
    device: Device = Device.CPU
    dtype: Dtype = Dtype.AUTO
    kv_dtype: Dtype = Dtype.AUTO
    """What KV is stored as; AUTO: as the weights are. Pools may differ: receivers convert."""
    cores: tuple[int, ...] = ()
    """CPU cores to take from, ``cores_per_worker`` each; empty: the workers are not pinned."""
    cores_per_worker: int = 1
    cpus_per_worker: float = 0.0
    """CPUs that Ray sets aside for a worker; 0: it is placed by the rest alone."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray sets aside for a worker: one, or a part of one that others share."""
    accelerator_type: str = ""
    """Ray's word for the hardware that the workers need, like H100; empty: any."""
    node_labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Labels that a node has to have."""
    transport: TransportKind | None = None
    """How its workers move KV; None: as the cluster's do. Pools may differ where they have one in
    common: AUTO takes both of the others."""
    cost_per_hour: float = 0.0
    """Of one worker, in whatever currency all pools use."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens that one worker computes in a second, until one has shown what it does; 0:
    as many as those of other pools. Only scaling asks for it."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_tokens: int = DEFAULT_KV_TOKENS
    """KV capacity of one worker, in tokens; a multiple of ``block_size``."""
    kv_bytes: int = 0
    """The same in bytes, where it is not given in tokens; turned into tokens for the model."""
    max_num_seqs: int = 8
    """Sequences that share a step."""
    token_budget: int = 2048
    """Tokens computed in one step at most."""
    chunk_tokens: int = 512
    """A prompt's share of a step at most; 0: the whole prompt, within the budget. A step cuts one
    prompt only; what it can end beside that, it ends."""
    batching: Batching = Batching.CONTINUOUS
    batch_size: int = 0
    """Members of a static or dynamic batch at most; 0: ``max_num_seqs``."""
    batch_window_ms: float = DEFAULT_WINDOW_MS
    """For how long a dynamic batch collects at most."""
    prefix_cache: bool = True
    """Keep the KV of ended sequences until its room is needed, for prompts that begin alike."""
    prefix_shared: bool = False
    """Whether tenants find one another's KV too: what is answered sooner then tells what others
    have asked."""
    swap_tokens: int = 0
    """KV of preempted sequences that one worker keeps in CPU memory at most, in tokens, with
    ``scheduling.preemption: swap``; 0: as much as ``kv_tokens``. What finds no room there is
    computed again."""

    @property
    def is_scaled(self) -> bool:
        """Whether its workers come and go with the load."""
        return self.max > 0

    @property
    def min_count(self) -> int:
        """Workers at least."""
        return self.min if self.is_scaled else self.count

    @property
    def max_count(self) -> int:
        """Workers at most."""
        return self.max if self.is_scaled else self.count

    @property
    def num_blocks(self) -> int:
        """KV blocks of one worker."""
        return self.kv_tokens // self.block_size

    @property
    def num_swap_slots(self) -> int:
        """Blocks that one worker's swap buffer holds, where there is one."""
        return (self.swap_tokens or self.kv_tokens) // self.block_size

    @property
    def num_batch_slots(self) -> int:
        """Sequences that share a step at most, by the kind of batching too."""
        return self.batch_size or self.max_num_seqs

    @property
    def stored_dtype(self) -> Dtype:
        """What KV is stored as; AUTO where only a worker on its device can say."""
        return self.dtype if self.kv_dtype is Dtype.AUTO else self.kv_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """How waiting requests are ordered and how far prefill may run ahead."""

    policy: Policy = Policy.FCFS
    tiers: tuple[str, ...] = ("low", "normal", "high")
    """Names that requests may give as their ``priority``, from the lowest to the highest."""
    default_tier: str = "normal"
    """Of requests that name none."""
    aging_s: float = 5.0
    """Nobody who is younger by more than this overtakes a request, or takes what it waits for or
    has; where tenants are served fairly, nobody of the same tenant in its tier."""
    fair_tenants: bool = False
    """Whether tenants get fair shares of tokens within a tier."""
    preemption: Preemption = Preemption.RECOMPUTE
    max_preemptions: int = 3
    """Of one choice, over all its workers and attempts; it then goes on only with room for all that
    may come."""
    max_queue_requests: int = 256
    max_queue_tokens: int = 1 << 20
    """Prompt tokens that wait at most; a single request may have more."""
    tenant_queue_share: float = 0.5
    """Part of the queue that the requests of one tenant may take, where tenants have keys."""
    run_ahead_tokens: int = 4096
    """Prompt tokens granted to one prefill worker and not yet computed, at most."""
    local_prefill: LocalPrefill = LocalPrefill.AUTO
    local_prefill_tokens: int = 64
    """Tokens that a decode worker computes for one prompt at most, where ``local_prefill`` is
    auto: what is cached there does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """What pools with a ``max`` are scaled for."""

    ttft_target_s: float = 1.0
    """For a prompt to wait behind others before it is computed, at most."""
    tpot_target_s: float = 0.0
    """For a decode step at most; 0: slots and KV alone say how much a worker decodes."""
    quiet_s: float = 120.0
    """For so long the load has to have been low before a worker goes."""
    start_s: float = 600.0
    """A worker that isn't there after so long counts for nothing: others are taken in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Caps that are checked before work in proportion to them."""

    default_deadline_s: float = 120.0
    max_deadline_s: float = 600.0
    max_body_bytes: int = 1 << 20
    max_header_bytes: int = 64 << 10
    """Of one HTTP request's head, or one gRPC call's metadata."""
    max_json_depth: int = 32
    max_id_chars: int = 128
    """Of an id or name that a client gives."""
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    """Entries of ``logit_bias``."""
    max_logprobs: int = 20
    """Best tokens told with each token; 5 for completions, as OpenAI has it."""
    max_messages: int = 256
    max_content_parts: int = 64
    """Of one message."""
    max_tools: int = 64
    """Of a chat, and calls of tools in one message."""
    max_n: int = 16
    """Choices of one prompt."""
    max_prompts: int = 32
    """Of one call."""
    max_choices: int = 64
    """Of all prompts of a call together."""
    max_streams_per_key: int = 256
    """Calls of one API key that are open at once, in one router."""
    max_connections_per_address: int = 512
    """Of one client's address to one door of one router; behind a proxy all have the proxy's."""
    export_lease_s: float = 10.0
    """How long prefilled KV waits for another decode worker after a handoff failed."""
    reserve_patience_s: float = 1.0
    """How long an offered export waits for blocks on its decode worker before it is refused."""
    drain_s: float = 30.0
    """For what runs on a worker or router that is told to end; what is left then goes on elsewhere.
    One that has nothing left ends at once."""
    stream_kv: bool = True
    """Whether finished layers and blocks are sent while later ones are computed; else all at the
    end."""
    link_idle_s: float = 60.0
    """A link that carried nothing for so long is closed; the next handoff dials a new one."""
    kv_digest: bool = False
    """Whether KV is digested before it is sent and after it came; corrupted KV is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsConfig:
    """Where routers and control plane listen: an address of the head node, ports that differ."""

    host: str = "127.0.0.1"
    """Loopback, or with a cluster token the address that clients and other nodes reach.

    ``head``: the head node's in the cluster's network, which `pdserve deploy` finds out.
    """
    http_port: int = 8000
    grpc_port: int = 8001
    control_port: int = 8002


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The ingress."""

    replicas: int = 1
    resume: bool = True
    """Whether a request goes on with other workers when its own are lost after a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """Faults on purpose, for tests; never beyond loopback."""

    enabled: bool = False
    """Workers, and routers at their gRPC door, serve ``pdserve.faults.v1.Faults``: whoever reaches
    them can break them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Everything one cluster needs to know, one file."""

    pools: tuple[PoolConfig, ...]
    host: Host = Host.RAY
    service_cores: tuple[int, ...] = ()
    """CPU cores of all that is no worker (routers, control plane, Ray); empty: not pinned."""
    transport: TransportKind = TransportKind.TORCH_DIST
    """Of the pools that name none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def pool(self, name: str) -> PoolConfig:
        """Return the pool called ``name``; raises ConfigError where there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise config_tree.refused("pools", name, [pool.name for pool in self.pools], what="pool")

    def transport_of(self, pool: PoolConfig) -> TransportKind:
        """Return how the workers of a pool move KV."""
        return pool.transport or self.transport

    @property
    def transports(self) -> frozenset[TransportKind]:
        """Those of all pools."""
        return frozenset(map(self.transport_of, self.pools))
