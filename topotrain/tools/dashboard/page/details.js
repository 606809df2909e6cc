// The figures of one process, the slices of a server, and the last lines of its log.

import { byId, fillFigures, make, metricText, numberText, setText } from "./elements.js";
import { STATES } from "./job_view.js";

const FIGURES = {
  loss: "loss", samples_per_s: "samples per second", updates_per_s: "updates per second",
  waiting_share: "time spent waiting", staleness_mean: "staleness, mean", staleness_p95: "staleness, p95",
  staleness_max: "staleness, max", memory_bytes: "memory",
};
const LOG_EVERY_MS = 2000;

/** The panel of the selected process. */
export class ProcessDetails {
  constructor(source, onClose) {
    this._source = source;
    this._panel = byId("details");
    this._name = null;
    byId("details-close").addEventListener("click", () => onClose());
    this._panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") onClose();
    });
  }

  /** Show a process, or none. */
  select(name) {
    this._name = name;
    this._panel.hidden = name === null;
    byId("details-log").hidden = true;
    setText(byId("details-log-text"), "");
    if (name !== null) this._readLog(name);
  }

  /** Read the log again. Called when the server has just sent something of a running job: so it is still there. */
  refresh() {
    const due = performance.now() - this._readAt >= LOG_EVERY_MS;
    if (this._name !== null && this._source.live && due) this._readLog(this._name);
  }

  /** Show the figures at a moment. */
  update(view, t) {
    const process = this._name === null ? null : view.processOf(this._name);
    if (!process) return;
    const point = view.pointAt(process.name, "loss", t) ?? view.pointAt(process.name, "samples_per_s", t);
    setText(byId("details-title"), process.name);
    const place = [process.unit === null || process.unit === undefined ? null : `unit ${process.unit}`,
      process.host, process.pid ? `process ${process.pid}` : null];
    setText(byId("details-place"), place.filter(Boolean).join(" · "));
    const slow = view.stragglersAt(t).get(process.name);
    byId("details-straggler").hidden = !slow;
    if (slow) {
      setText(byId("details-straggler"), `Slow: a sample takes it ${slow.toFixed(1)} times the median of all workers, waits not counted.`);
    }
    const pairs = [["state", STATES[view.stateAt(process.name, t)]]];
    if (point && point[1] > 0) pairs.push(["step", numberText(point[1])]);
    for (const [metric, label] of Object.entries(FIGURES)) {
      const value = view.valueAt(process.name, metric, t);
      if (value !== null) pairs.push([label, metricText(metric, value)]);
    }
    for (const one of view.series.values()) {
      if (one.of !== process.name || !one.metric.startsWith("log:")) continue;
      const value = view.valueAt(process.name, one.metric, t);
      if (value !== null) pairs.push([one.metric.slice(4), numberText(value)]);
    }
    fillFigures(byId("details-figures"), pairs);
    this._slices(process);
  }

  _slices(process) {
    const slices = process.slices ?? [];
    byId("details-slices").hidden = slices.length === 0;
    const rows = byId("details-slice-rows");
    if (this._sliced === slices) return;
    this._sliced = slices;
    rows.replaceChildren(...slices.map((slice) => make("tr", {}, [make("td", { text: slice.name }),
      make("td", { text: numberText(slice.first) }), make("td", { text: numberText(slice.count) })])));
  }

  async _readLog(name) {
    this._readAt = performance.now();
    let text = null;
    try {
      text = await this._source.log(name);
    } catch {
      // The server is gone; the page says so elsewhere.
    }
    if (this._name !== name) return;
    byId("details-log").hidden = text === null;
    if (text !== null) {
      const area = byId("details-log-text");
      const atEnd = area.scrollTop + area.clientHeight >= area.scrollHeight - 4;
      setText(area, text || "(nothing yet)");
      if (atEnd) area.scrollTop = area.scrollHeight;
    }
  }
}
