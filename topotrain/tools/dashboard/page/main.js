// The page: data come in, the moment is chosen, and every part shows the job at that moment.

import { Charts } from "./charts.js";
import { DataSource } from "./data_source.js";
import { ProcessDetails } from "./details.js";
import { byId, clockText, make, numberText, setText } from "./elements.js";
import { EventList } from "./event_list.js";
import { MomentBar } from "./moment_bar.js";
import { Processes } from "./processes.js";
import { RunTable } from "./run_table.js";

const CONNECTIONS = { live: "running", recorded: "recorded", lost: "connection lost, trying again", waiting: "connecting" };

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
