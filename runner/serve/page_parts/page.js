"use strict";
const SECONDS = 2;
let shown = "";
const byId = (name) => document.getElementById(name);

// The token stands behind "#", which no browser sends anywhere, and is kept for reloads of this tab.
if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

function figures(batch) {
  const ended = batch.completed + batch.failed;
  const rows = [["rows", `${ended.toLocaleString("en")} of ${batch.total.toLocaleString("en")}`]];
  if (batch.failed) rows.push(["failed", batch.failed.toLocaleString("en")]);
  if (batch.tokens_per_second !== null) rows.push(["speed", `${batch.tokens_per_second} tokens/s`]);
  if (batch.seconds_left !== null) rows.push(["time left", `about ${span(batch.seconds_left)}`]);
  if (batch.acceptance !== null) rows.push(["acceptance", `${(100 * batch.acceptance).toFixed(1)}%`]);
  rows.push(["model", batch.model ?? "none"]);
  rows.push(["created", new Date(1000 * batch.created_at).toLocaleString()]);
  for (const [name, value] of Object.entries(batch.metadata)) rows.push([name, value]);
  return rows;
}

// Only texts are put into the page: nothing that a client named is ever read as HTML.
function draw(batch) {
  const item = byId("batch").content.cloneNode(true).firstElementChild;
  item.classList.add(batch.status);
  item.querySelector("h2").textContent = batch.id;
  item.querySelector(".status").textContent = batch.status.replace("_", " ");
  const share = (count) => (batch.total ? (100 * count) / batch.total : 0);
  const bar = item.querySelector(".bar");
  bar.setAttribute("aria-label", `progress of ${batch.id}`);
  bar.setAttribute("aria-valuenow", Math.round(share(batch.completed + batch.failed)));
  bar.querySelector(".done").style.width = `${share(batch.completed)}%`;
  bar.querySelector(".failed").style.width = `${share(batch.failed)}%`;
  for (const [name, value] of figures(batch)) {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    pair.firstChild.textContent = name;
    pair.lastChild.textContent = value;
    item.querySelector("dl").append(pair);
  }
  item.querySelector(".errors").textContent = batch.errors.join("\n");
  if (batch.report) {
    const link = document.createElement("a");
    link.href = batch.report;
    link.target = "_blank";
    link.rel = "noreferrer";
    link.textContent = "report";
    item.querySelector(".links").append(link);
  }
  return item;
}

async function look() {
  const token = sessionStorage.getItem("token");
  if (!token) return;
  try {
    const answer = await fetch("/page/data", { headers: { Authorization: `Bearer ${token}` } });
    if (answer.status === 401) {
      byId("notice").textContent = "This link is of another server's key: open the one that outrider serve has printed.";
      return;
    }
    const text = await answer.text();
    if (text === shown) return;
    shown = text;
    const data = JSON.parse(text);
    byId("models").textContent = data.models.map((model) => `${model.name}: ${model.state}`).join(" · ");
    byId("batches").replaceChildren(...data.batches.map(draw));
    const more = data.more ? `The newest ${data.batches.length} batches.` : "";
    byId("notice").textContent = data.batches.length ? more : "No batches yet.";
  } catch {
    shown = "";
    byId("notice").textContent = "The server does not answer; what is shown is what it said last.";
  }
}

async function repeat() {
  await look();
  setTimeout(repeat, 1000 * SECONDS);
}
repeat();
