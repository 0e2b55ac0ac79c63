// The Monitor tab: asks /v1/monitor every few seconds while it is seen, and shows what the monitor says of the stream.

import { ask, latest, Trouble } from "./api.js";
import { drawEvidence, empty, SWATCHES } from "./charts.js";
import { count, monitorFacts, monitorWords, standing, TESTS } from "./monitor_words.js";
import { element, svg } from "./numbers.js";

const SECONDS = 3;
const at = (id) => document.getElementById(id);
// Charts count inputs or labels, as their tests do.
const KINDS = { inputs: { column: "input", unit: "answers" }, labels: { column: "labels", unit: "labels" } };

// The evidence of one test: from its beginning, a capital of 1, to its alarm.
function lineOf({ name, kind, rate, alarm }, { history }) {
  const column = history[KINDS[kind].column];
  const points = [[0, rate], ...history.evidence[name].map((value, place) => [column[place], value])];
  if (!alarm) return { name: TESTS[name], points };
  const place = kind === "inputs" ? alarm.at : alarm.observations;
  const height = alarm.capital * alarm.rate;
  // It has been silent since.
  const before = points.filter(([x]) => x < place);
  return { name: TESTS[name], points: [...before, [place, height]], alarm: { place, height, since: kind === "inputs" ? alarm.since : null } };
}

export class MonitorView {
  // `unauthorised` asks for a token; `wake` goes on after that.
  constructor(model, unauthorised) {
    this.model = model;
    this.unauthorised = unauthorised;
    this.isChosen = false;
    this.told = null;
    this.refresh = latest(() => this.ask());
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("resize", () => { if (this.isChosen && this.told) this.draw(); });
  }

  choose(isChosen) {
    this.isChosen = isChosen;
    this.wake();
  }

  get isSeen() { return this.isChosen && !document.hidden && !at("token-dialog").open; }

  async wake() {
    clearTimeout(this.timer);
    if (!this.isSeen) return;
    await this.refresh();
    clearTimeout(this.timer);
    if (this.isSeen) this.timer = setTimeout(() => this.wake(), 1000 * SECONDS);
  }

  async ask() {
    try {
      this.told = await ask("/v1/monitor");
      this.show();
    } catch (trouble) {
      if (!(trouble instanceof Trouble)) throw trouble;
      this.fail(trouble.message);
      if (trouble.status === 401) this.unauthorised();
    }
  }

  // What the monitor said before an error is gone: it may have raised an alarm since.
  fail(sentence) {
    this.told = null;
    at("monitor").dataset.state = "error";
    at("monitor-verdict").textContent = "No answer.";
    at("monitor-message").textContent = sentence;
    at("monitor-detail").textContent = "";
    for (const id of ["monitor-alarms", "monitor-facts", "monitor-inputs-tests", "monitor-labels-tests"]) at(id).replaceChildren();
    at("monitor-alarms-card").hidden = true;
    for (const kind of Object.keys(KINDS)) empty(at(`monitor-${kind}`), "Waiting for the service.");
  }

  show() {
    const classes = this.told.posterior === this.model.posterior ? this.model.classes : null;
    const { sentences, alarms, detail, state } = monitorWords(this.told, { classes });
    at("monitor-message").textContent = "";
    at("monitor-verdict").replaceChildren(...sentences.map((sentence, place) => element("span", {}, (place ? " " : "") + sentence)));
    at("monitor-detail").textContent = detail;
    // Only what is new is read out.
    const list = at("monitor-alarms");
    at("monitor-alarms-card").hidden = !alarms.length;
    const known = [...list.children].map((line) => line.textContent);
    if (known.join() !== alarms.join()) list.replaceChildren(...alarms.map((sentence) => element("li", {}, sentence)));
    at("monitor-facts").replaceChildren(...monitorFacts(this.told).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    this.draw();
    at("monitor").dataset.state = state;
  }

  draw() {
    for (const [kind, { unit }] of Object.entries(KINDS)) {
      const tests = this.told.tests.filter((test) => test.kind === kind);
      const total = kind === "inputs" ? this.told.inputs : this.told.labels;
      at(`monitor-${kind}-tests`).replaceChildren(...tests.map((test, place) => this.line(test, place, total)));
      if (!total) { empty(at(`monitor-${kind}`), `No ${unit} yet.`); continue; }
      const said = tests.map((test) => `${TESTS[test.name]}: ${standing(test)}`).join("; ");
      const label = `Evidence of change over ${count(total)} ${unit}, as a share of an alarm's. ${said}`;
      drawEvidence(at(`monitor-${kind}`), tests.map((test) => lineOf(test, this.told)), { total, unit, label });
    }
  }

  line(test, place, total) {
    const swatch = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("path", { class: SWATCHES[place], d: "M0 5H26" }));
    const line = element("li", {}, swatch, element("span", {}, TESTS[test.name]), element("b", {}, total ? standing(test) : "–"));
    line.dataset.alarm = Boolean(test.alarm);
    return line;
  }
}
