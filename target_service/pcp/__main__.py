"""How does a rank that is not rank 0 run? `python -m target_service.pcp`, started by rank 0 and by nobody else.

Loads the model, meets the others, and runs every step that rank 0 orders, until the board is closed. It has no state
but its KV cache. Any mistake ends the process, and with it, by rank 0's watch, the whole target: a rank that went on
after an error would leave the others waiting in a collective.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from engine.ending import end_now
from engine.errors import OutriderError, RanksLost
from engine.leash import tie_to_parent
from kernels.attention.interface import AttentionBackend
from target_service.config import TargetConfig
from target_service.model import LoadedModel, load_model, make_backends, prepare_device, runs_on_device
from target_service.pcp.board import Board, RankState
from target_service.pcp.captured import Follower, let_go, make_graphs
from target_service.pcp.forward import RankForward
from target_service.pcp.group import Backend, RankGroup, TorchGroup, choose_backend
from target_service.pcp.laps import NoWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.settings import BEAT_S, JOIN_TIMEOUT_S, NOTICE_S, REST_S, RankArguments, collective_timeout_s
from target_service.pcp.warm import warm_up

_log = logging.getLogger(__name__)

TAKE_S = 1.0
BUG_STATUS = 1
MODEL_STATUS = 2
LOST_STATUS = 3


def main(arguments: list[str] | None = None) -> int:
    """Serve rank 0's orders. Returns the exit status, 0, once the board was closed and the group left.

    Any other end is the process's end, here and at once, with a status of 1: a bug, or no memory; 2: the model cannot
    be loaded; 3: the ranks are lost.
    """
    parser = argparse.ArgumentParser(prog="target_service.pcp", description="A rank of Outrider's target service.")
    parser.add_argument("arguments", help="what rank 0 tells it, as JSON")
    told = RankArguments.model_validate_json(parser.parse_args(arguments).arguments)
    tie_to_parent(told.parent_pid, sys.stdin.fileno(), LOST_STATUS)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the service, which ends its ranks when it is done
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {told.rank} %(name)s: %(message)s", force=True
    )
    try:
        left = serve(told)
    # Ended in the handlers: what the error's frames hold, graphs among it, is not let go first.
    except RanksLost as error:
        _log.error("%s", error)
        end_now(LOST_STATUS)
    except OutriderError as error:
        print(f"target_service rank {told.rank}: {error}", file=sys.stderr)
        end_now(MODEL_STATUS)
    except RuntimeError:
        # So fails a collective in which another rank has ended, too. Rank 0 then ends this one as well, with the right
        # words; a fault of its own is told a moment later.
        threading.Event().wait(NOTICE_S)
        _log.exception("the rank ends")
        end_now(BUG_STATUS)
    except BaseException:  # whatever it is, the others wait for this rank until its process is gone
        _log.exception("the rank ends")
        end_now(BUG_STATUS)
    if not left:
        end_now(0)
    return 0


def serve(told: RankArguments) -> bool:
    """Load, join, run. Whether the group, if there was one, has been left."""
    config: TargetConfig = told.config
    board = Board.attach(told.board_name, config.pcp_size, told.order_bytes, told.board_depth)
    threading.Thread(target=_beat, args=(board, told.rank), name="beat", daemon=True).start()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = choose_backend(config.pcp_backend, torch.device(config.device), config.pcp_size)
    device = prepare_device(config, told.rank)
    model = load_model(config, Path(told.model_directory), device)
    piece_backends = make_backends(config, model.decoder)
    on_device = runs_on_device(config, model.decoder.device, model.attention_backends)
    if model.decoder.device.type == "cuda":
        warm_up(model, (model.attention_backends, piece_backends), config.max_step_tokens)
    board.set_state(told.rank, RankState.LOADED)
    while not board.wait_joining(TAKE_S):
        if board.closed:
            return True
    timeout_s = collective_timeout_s(config, on_device)
    group = TorchGroup(told.rank, config.pcp_size, backend, told.port, device, JOIN_TIMEOUT_S, timeout_s)
    board.set_state(told.rank, RankState.JOINED)
    if on_device:
        _follow_launches(told.rank, board, model, piece_backends, group, config, backend)
    else:
        _follow(told.rank, board, model, piece_backends, group)
    return group.close()


def _follow(
    rank: int, board: Board, model: LoadedModel, piece_backends: Sequence[AttentionBackend], group: RankGroup
) -> None:
    """Host execution: run step after step."""
    forward = RankForward(model, piece_backends, group)
    seq = 1
    while not board.closed:
        order = board.take(rank, seq, TAKE_S)
        if order is not None:
            forward.run(order)
            forward.forget_times()
            seq += 1


def _follow_launches(
    rank: int,
    board: Board,
    model: LoadedModel,
    piece_backends: Sequence[AttentionBackend],
    group: RankGroup,
    config: TargetConfig,
    backend: Backend,
) -> None:
    """Device execution: launch step after step, on a stream of this rank's own as rank 0 does. Never further ahead of
    the device than rank 0 is, whose steps under way are bounded. RanksLost where the device does not come to rest.
    """
    device = model.decoder.device
    forward = LaunchForward(model, piece_backends, group, NoWatch())
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)  # what was made so far was made on another stream
    graphs = make_graphs(config, model.max_model_len, device, backend)
    follower = Follower(forward, graphs)
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        seq = 1
        while not board.closed:
            order = board.take_launch(rank, seq, TAKE_S)
            if order is not None:
                follower.run(order)
                seq += 1
    # The group is left when nothing of it runs any more, and nothing is kept that could.
    if not let_go(graphs, device, REST_S):
        raise RanksLost(f"rank {rank}: its device did not come to rest within {REST_S:g} s")


def _beat(board: Board, rank: int) -> None:
    pause = threading.Event()
    while not board.closed:
        board.beat(rank)
        pause.wait(BEAT_S)


if __name__ == "__main__":
    sys.exit(main())
