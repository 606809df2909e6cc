// What can be asked of a running job, each with a confirmation.

import { byId, make, setText } from "./elements.js";

const ACTS = {
  snapshot: { button: "Take a snapshot", title: "Take a snapshot?", confirm: "Take it",
    text: "The job goes on. Its parameters and the state of its optimizer are written to the workspace." },
  leave: { button: "Let workers leave…", title: "Let workers leave?", confirm: "Let them leave", chooses: true,
    text: "The others go on. What has been applied is kept." },
  join: { button: "Let workers join…", title: "Let workers join?", confirm: "Let them join", chooses: true,
    text: "They start with the newest values." },
  stop: { button: "Stop the job…", title: "Stop the job?", confirm: "Stop it", grave: true,
    text: "All its processes end." },
};

/** The buttons of the acts, and their dialog. */
export class Acts {
  constructor(source) {
    this._source = source;
    this._dialog = byId("act-dialog");
    for (const [name, act] of Object.entries(ACTS)) {
      const button = make("button", { type: "button", id: `act-${name}`, class: act.grave ? "grave" : null, text: act.button });
      button.addEventListener("click", () => this._ask(name));
      byId("act-buttons").append(button);
    }
    this._dialog.addEventListener("close", () => this._closed());
  }

  /** Show the acts of a job that runs, and whose server can be reached. */
  update(view, reachable) {
    this._view = view;
    byId("acts").hidden = !this._source.live || !view.running || !reachable;
    if (byId("acts").hidden && this._dialog.open) this._dialog.close("cancel");
  }

  _ask(name) {
    const act = ACTS[name];
    const groups = this._view.workerGroups();
    this._asked = name;
    setText(byId("act-dialog-title"), act.title);
    setText(byId("act-dialog-text"), act.text);
    setText(byId("act-confirm"), act.confirm);
    byId("act-confirm").classList.toggle("grave", Boolean(act.grave));
    // Asynchronous jobs change by worker groups, and jobs of one group by workers.
    byId("act-group-label").hidden = !act.chooses || groups.length < 2;
    byId("act-workers-label").hidden = !act.chooses || groups.length >= 2;
    byId("act-group").replaceChildren(...groups.map((group) => make("option", { value: String(group), text: String(group) })));
    this._dialog.returnValue = "cancel";
    this._dialog.showModal();
    byId("act-cancel").focus();
  }

  async _closed() {
    if (this._dialog.returnValue !== "confirm") return;
    const wish = { act: this._asked };
    if (!byId("act-group-label").hidden) wish.group = Number(byId("act-group").value);
    if (!byId("act-workers-label").hidden) wish.workers = Number(byId("act-workers").value);
    const answer = byId("act-answer");
    setText(answer, "Asked; the answer may take a moment.");
    answer.classList.remove("bad");
    try {
      const { ok, text } = await this._source.act(wish);
      answer.classList.toggle("bad", !ok);
      setText(answer, text);
    } catch {
      answer.classList.add("bad");
      setText(answer, "No answer: the job's server cannot be reached.");
    }
  }
}
