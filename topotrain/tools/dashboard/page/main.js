// The page: data come in, the moment is chosen, and every part shows the job at that moment.

import { Charts } from "./charts.js";
import { DataSource } from "./data_source.js";
import { byId, clockText, make, numberText, setText } from "./elements.js";
import { EventList } from "./event_list.js";
import { ProcessDetails, Processes } from "./processes.js";
import { RunTable } from "./run_table.js";

const CONNECTIONS = { live: "running", recorded: "recorded", lost: "connection lost, trying again", waiting: "connecting" };

/** The bar at the bottom. `t` is the moment in seconds since the start. */
class MomentBar {
  constructor(onMoment) {
    this._onMoment = onMoment;
    this._slider = byId("moment-slider");
    this._follow = byId("moment-follow");
    [this.t, this.end, this.follows] = [0, 0, true];
    this._slider.addEventListener("input", () => this.goTo(Number(this._slider.value)));
    this._follow.addEventListener("click", () => this.follow());
  }

  /** The job is known up to `end`; `running`: it goes on. */
  setEnd(end, running) {
    this.end = end;
    this._slider.max = end;
    setText(this._follow, running ? "Follow" : "To the end");
    this._set(this.follows ? end : this.t);
  }

  goTo(t) {
    this.follows = false;
    this._set(t);
  }

  follow() {
    this.follows = true;
    this._set(this.end);
  }

  _set(t) {
    this.t = Math.min(this.end, Math.max(0, t));
    this._slider.value = this.t;
    const text = `${clockText(this.t)} / ${clockText(this.end)}`;
    this._slider.setAttribute("aria-valuetext", text);
    setText(byId("moment-time"), text);
    this._follow.setAttribute("aria-pressed", String(this.follows));
    this._onMoment();
  }
}

/** Add a figure of the job to the header; return the place of its text. */
function figureOf(name) {
  const place = make("dd", { "data-figure": name });
  byId("job-figures").append(make("div", {}, [make("dt", { text: name }), place]));
  return place;
}

class Page {
  constructor() {
    this._processes = new Processes((name) => this._show(name));
    this._details = new ProcessDetails((name) => this._source.log(name), () => this._closeDetails());
    this._events = new EventList((event) => this._choose(event));
    this._charts = new Charts((t) => this._bar.goTo(t), (run) => this._runTable.toggle(run));
    this._bar = new MomentBar(() => this._showMoment());
    this._runTable = new RunTable((hidden) => this._charts.compare(this._runs, hidden), (run) => this._source.follow(run));
    // The style sheet reads the choice, and what the system says.
    byId("theme").addEventListener("change", () => this._charts.redraw());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._charts.redraw());
    this.onConnection("waiting");
    this._source = new DataSource(this);
  }

  /** A whole View has come: the first one, or that of another job or run. */
  onView(view) {
    this._view = view;
    this._select(null);
    this._bar.follow();
    setText(byId("block-text"), view.job.block ?? "");
    byId("block").hidden = !view.job.block;
    this.onDelta();
  }

  onDelta() {
    this._header(this._view);
    this.onConnection(this._connection);
    this._events.update(this._view);
    this._details.update(this._view);
    this._charts.show(this._view);
    this._bar.setEnd(this._view.end, this._view.running && this._source.live);
    if (this._view.running && this._source.live) this._details.refresh();
  }

  onRuns(runs) {
    this._runs = runs;
    this._runTable.update(runs, this._source.live);
    this._charts.compare(runs, this._runTable.hidden);
  }

  onConnection(connection) {
    this._connection = connection;
    document.body.dataset.connection = connection;
    [byId("connection").dataset.state, byId("connection").textContent] = this._state();
  }

  _state() {
    const { code, lost } = this._view?.job ?? {};
    if (Number.isFinite(this._view?.job.ended)) return code ? ["failed", `failed, code ${code}`] : ["ended", "ended"];
    if (lost) return ["failed", "lost: its launcher is gone"];
    return [this._connection, CONNECTIONS[this._connection]];
  }

  _showMoment() {
    const { t, follows } = this._bar;
    this._processes.update(this._view, t);
    this._events.setMoment(t, this._chosen);
    this._charts.setMoment(follows ? null : t);
  }

  _header({ job, running }) {
    setText(byId("job-name"), job.name || "topotrain");
    setText(byId("job-framework"), job.framework ?? "");
    document.title = `${job.name || "job"} – topotrain`;
    const known = Number.isFinite(job.progress);
    byId("job-progress").hidden = !known;
    byId("job-progress").value = job.progress ?? 0;
    const texts = {
      elapsed: clockText(job.elapsed),
      done: known ? `${Math.floor(job.progress * 100)} %` : "–",
      left: running && Number.isFinite(job.eta_s) ? `about ${clockText(job.eta_s)}` : "–",
      epoch: Number.isInteger(job.epoch) ? String(job.epoch + 1) : "–",
      step: job.step > 0 ? job.step.toLocaleString("en") : "–",
      loss: numberText(job.loss),
      "samples/s": numberText(job.samples_per_s),
    };
    for (const [name, text] of Object.entries(texts)) {
      const place = document.querySelector(`[data-figure="${name}"]`) ?? figureOf(name);
      setText(place, text);
      place.parentElement.hidden = text === "–";
    }
  }

  _select(name) {
    this._selected = name;
    this._processes.select(name);
    this._details.select(this._view, name);
  }

  _show(name) {
    this._select(name);
    byId("details").scrollIntoView({ block: "nearest" });
  }

  _closeDetails() {
    const name = this._selected;
    this._select(null);
    this._processes.focus(name);
  }

  _choose(event) {
    this._chosen = event;
    if (this._view.processes.some((one) => one.name === event.of)) this._select(event.of);
    this._bar.goTo(event.at);
  }
}

new Page();
