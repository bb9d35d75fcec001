"""Steps over several streams, in a graph: fork, waits between streams, and join.

Steps are queued in the plan's order whatever their streams, so that random kernels draw the same numbers as on one
stream: each draw advances torch's generator on the host.
"""

from collections.abc import Mapping
from typing import Any

from autotuner.plan.memory_planner import Schedule
from autotuner.runtime.devices import DeviceRuntime, Run


class BranchingCalls:
    """Calls of steps of one phase, by number. Outside of a capture they run one by one on the current stream.

    There the host is slower than the device, and nothing would overlap. A step that is left out waits and is waited for
    all the same, as if it took no time: memory is planned so, for the steps before it on its branch too.
    """

    def __init__(self, calls: Mapping[int, Run], schedule: Schedule, device: DeviceRuntime) -> None:
        self._calls, self._schedule, self._device = calls, schedule, device
        self._numbers = schedule.phase(min(calls))
        self._used = sorted({schedule.streams[number] for number in self._numbers})

    def run(self) -> None:
        if not self._device.is_capturing():
            for call in self._calls.values():
                call()
            return
        schedule, caller = self._schedule, self._device.current()
        lanes = self._device.lanes(self._used[-1] + 1)
        for place in self._used:
            lanes[place].wait_stream(caller)
        events: dict[int, Any] = {}
        for number in self._numbers:
            stream = lanes[schedule.streams[number]]
            for source in schedule.waits(number):
                stream.wait_event(events[source])
            if number in self._calls:
                with self._device.on(stream):
                    self._calls[number]()
            if number in schedule.awaited:
                events[number] = stream.record_event()
        for place in self._used:
            caller.wait_stream(lanes[place])
