// What the Monitor tab says before it shows a number: a rule from the answer of /v1/monitor to sentences, and nothing
// else. An alarm is one of the monitor's own; the page has no limit of its own for it.

import { percent, plain, whole } from "./numbers.js";

export const LIMITS = {
  near: 0.1, // evidence, as a share of that of an alarm, from which an alarm is said to be near
  least: 1e-6, // the least evidence that the service tells
};

export const TESTS = {
  mutual_information: "Doubt of the model itself",
  entropy: "Doubt about the class",
  classes: "Predicted classes",
  overconfidence: "Confidence above accuracy",
  underconfidence: "Confidence below accuracy",
  innovation: "Surprise of the labels",
};

export const count = (number) => number.toLocaleString("en-GB");

const some = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

export const moment = (seconds) => new Date(1000 * seconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

function finding({ test, side }, classes) {
  const number = Number((side.match(/\d+$/) || [])[0]);
  const more = { higher: "higher than", lower: "lower than", different: "differently spread than" }[side];
  const findings = {
    mutual_information: `The model's own doubt is ${more} in the reference`,
    entropy: `The doubt about the class is ${more} in the reference`,
    classes: `More answers are “${classes ? classes[number] : number}” than in the reference`,
    overconfidence: "The model is surer than it is right",
    underconfidence: "The model is right more often than it says",
    innovation: "The labels are more surprising than the probabilities allow",
  };
  return findings[test];
}

// One alarm: what has changed, since when, and when that was noticed.
export function alarmWords(alarm, classes) {
  const when = (seconds, about = "") => (seconds === null ? "" : ` (${about}${moment(seconds)})`);
  return `${finding(alarm, classes)}, since about answer ${count(alarm.since)}${when(alarm.since_time, "about ")}. Noticed at answer ${count(alarm.at)}${when(alarm.time)}.`;
}

// How far a test is from its alarm.
export function standing({ evidence, alarm }) {
  if (alarm) return "alarm";
  if (evidence <= LIMITS.least) return `less than 1/${count(Math.round(1 / LIMITS.least))} of an alarm`;
  return evidence >= 0.67 ? "almost an alarm" : `1/${count(Number((1 / evidence).toPrecision(2)))} of an alarm`;
}

function agreementWords({ labels, confidence, accuracy, gap, interval, level }, tolerance) {
  if (!labels) return "No labels have come, so whether the answers are right is not known.";
  const points = (value) => (100 * value).toFixed(1).replace("-", "−");
  return `Mean confidence ${percent(confidence)}, accuracy ${percent(accuracy)}: a gap of ${points(gap)} points (${whole(level)} interval ${points(interval[0])} to ${points(interval[1])}; up to ±${points(tolerance)} are accepted).`;
}

// `classes` are the names of the classes of the posterior that is monitored, or null.
export function monitorWords(told, { classes = null } = {}) {
  const kinds = Object.fromEntries(told.tests.map(({ name, kind }) => [name, kind]));
  const alarms = told.alarms.map((alarm) => alarmWords(alarm, classes));
  const first = (kind) => told.alarms.find(({ test }) => kinds[test] === kind);
  const parts = [];
  if (first("inputs")) parts.push(`the inputs differ from the reference since about answer ${count(first("inputs").since)}`);
  if (first("labels")) parts.push(`the labels differ from the predictions since about answer ${count(first("labels").since)}`);
  if (parts.length) return { sentences: [`Alarm: ${parts.join(", and ")}.`], alarms, detail: agreementWords(told.agreement, told.tolerance), state: "alarm" };
  if (!told.inputs) {
    const detail = `As other clients are answered, their inputs are compared with ${some(told.reference_inputs, "held-out input")}.`;
    return { sentences: ["No answers yet."], alarms, detail, state: "empty" };
  }
  const labels = told.labels ? ` and ${some(told.labels, "label")}` : "";
  const sentences = [`No sign of change in ${some(told.inputs, "answer")}${labels}.`];
  const nearest = told.tests.reduce((most, test) => (test.evidence > most.evidence ? test : most));
  if (nearest.evidence >= LIMITS.near) sentences.push(`But an alarm is near: ${TESTS[nearest.name].toLowerCase()}.`);
  return { sentences, alarms, detail: agreementWords(told.agreement, told.tolerance), state: "calm" };
}

// The counts below the charts: names and values.
export function monitorFacts(told) {
  const late = told.dropped ? `, ${count(told.dropped)} no longer waited for` : "";
  const strange = told.unmatched ? `, ${count(told.unmatched)} of no answer that waits` : "";
  return [
    ["Answers monitored", count(told.inputs)],
    ["Answers left out", `${count(told.skipped)}, of this page or with other options than the reference`],
    ["Labels", `${count(told.labels)}, ${count(told.waiting)} awaited${late}${strange}`],
    ["Reference", `${some(told.reference_inputs, "held-out input")}, ${told.reference}`],
    ["False alarms", `in at most ${plain(100 * told.rate)} % of runs without a change, however long`],
    ["Running since", moment(told.started)],
  ];
}
