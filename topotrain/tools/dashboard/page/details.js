// The place of one process, the slices of a server, and the last lines of its log.

import { byId, make, numberText, setText } from "./elements.js";
import { placeOf } from "./processes.js";

const LOG_EVERY_MS = 2000;

/** The panel of the selected process. readLog gives the last lines of a log, or null. */
export class ProcessDetails {
  constructor(readLog, onClose) {
    this._readLog = readLog;
    this._panel = byId("details");
    this._name = null;
    byId("details-close").addEventListener("click", () => onClose());
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this._name !== null && onClose());
  }

  /** Show a process of a job, or none. */
  select(view, name) {
    this._name = name;
    this._panel.hidden = name === null;
    byId("details-log").hidden = true;
    setText(byId("details-log-text"), "");
    if (name === null) return;
    setText(byId("details-title"), name);
    this._slices = null;
    this.update(view);
    this._showLog();
  }

  /** Show what is new of the process: its number after another start, and a server's slices, which come after its start. */
  update(view) {
    const process = view.processes.find((one) => one.name === this._name);
    if (process === undefined) return;
    const { pid, slices = [] } = process;
    setText(byId("details-place"), [placeOf(process), pid ? `process ${pid}` : ""].filter(Boolean).join(" · "));
    if (this._slices?.length === slices.length) return;
    this._slices = slices;
    byId("details-slices").hidden = slices.length === 0;
    byId("details-slice-rows").replaceChildren(...slices.map((slice) => make("tr", {}, [make("td", { text: slice.name }),
      make("td", { text: numberText(slice.first) }), make("td", { text: numberText(slice.count) })])));
  }

  /** Read the log again. Called when the server has just sent something of a running job: so it is still there. */
  refresh() {
    if (this._name !== null && performance.now() - this._readAt >= LOG_EVERY_MS) this._showLog();
  }

  async _showLog() {
    const name = this._name;
    this._readAt = performance.now();
    const text = await this._readLog(name);
    if (this._name !== name) return;
    byId("details-log").hidden = text === null;
    const area = byId("details-log-text");
    const atEnd = area.scrollTop + area.clientHeight >= area.scrollHeight - 4;
    setText(area, text || "(nothing yet)");
    if (atEnd) area.scrollTop = area.scrollHeight;
  }
}
