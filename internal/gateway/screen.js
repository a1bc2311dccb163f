// Shows a sandbox's screen. The key comes in the address's fragment, which is never sent, or is typed; it is kept in this page alone.
import RFB from "./novnc/core/rfb.js";

const $ = (id) => document.getElementById(id);
const here = new URL(location.href);
const name = decodeURIComponent(here.pathname.split("/").pop());
const port = here.searchParams.get("port") || "0";
let key = new URLSearchParams(here.hash.slice(1)).get("key") || "";
let rfb = null;

function say(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

function show(id, on) {
  $(id).hidden = !on;
}

function address(scheme) {
  const u = new URL(here.pathname + "/rfb", here);
  u.protocol = scheme + (here.protocol === "https:" ? "s:" : ":");
  u.searchParams.set("port", port);
  return u;
}

// why asks for what a WebSocket does not tell: the status and text of a refusal.
async function why() {
  try {
    const u = address("http");
    u.searchParams.set("dsec_key", key);
    const r = await fetch(u, { credentials: "omit" });
    return [r.status, r.status === 204 ? "the connection broke" : (await r.text()).trim()];
  } catch {
    return [0, "the gateway does not answer"];
  }
}

function ask(text, bad) {
  say(text, bad);
  show("ask", true);
  $("key").focus();
}

function connect() {
  for (const id of ["ask", "again", "tools"]) show(id, false);
  say("Connecting");
  let shown = false;
  rfb = new RFB($("screen"), address("ws").href, { wsProtocols: ["binary", "dsec.key." + key], shared: true });
  rfb.scaleViewport = true;
  rfb.viewOnly = $("look").checked;
  rfb.addEventListener("connect", () => {
    shown = true;
    say("Connected");
    show("tools", true);
    rfb.focus();
  });
  rfb.addEventListener("credentialsrequired", () => {
    say("The display server wants a password; start it without: the sandbox is the wall.", true);
    rfb.disconnect();
  });
  rfb.addEventListener("disconnect", async () => {
    show("tools", false);
    const [status, text] = await why();
    if (status === 401) {
      ask(text, true);
      return;
    }
    say((shown ? "Disconnected: " : "") + text, true);
    show("again", true);
  });
}

document.title = name + " - screen";
$("name").textContent = name;
$("look").addEventListener("change", () => { if (rfb) rfb.viewOnly = $("look").checked; });
$("cad").addEventListener("click", () => { rfb.sendCtrlAltDel(); rfb.focus(); });
$("again").addEventListener("click", connect);
function typed() {
  key = $("key").value.trim();
  if (key) connect();
}
$("go").addEventListener("click", typed);
$("key").addEventListener("keydown", (e) => { if (e.key === "Enter") typed(); });
if (key) {
  location.replace("#"); // out of the address
  connect();
} else {
  ask("Give a key of the sandbox's project.");
}
