// The console, and in an AudioWorkletGlobalScope the piece of it that turns the microphone's sound into 16-bit samples.
"use strict";

if (typeof AudioWorkletProcessor === "function") {
  const FRAME_SECONDS = 0.02;

  class Samples extends AudioWorkletProcessor {
    constructor() {
      super();
      this.frame = new Int16Array(Math.round(sampleRate * FRAME_SECONDS));
      this.filled = 0;
    }

    process([input]) {
      for (const value of input[0] ?? []) {
        this.frame[this.filled++] = Math.max(-1, Math.min(1, value)) * 32767;
        if (this.filled === this.frame.length) {
          this.port.postMessage(this.frame.slice().buffer);
          this.filled = 0;
        }
      }
      return true;
    }
  }

  registerProcessor("samples", Samples);
} else {
  const $ = (id) => document.getElementById(id);
  const SAMPLE_RATE = 16000; // Hz; a browser that cannot resample sends its own rate
  const POLL_MS = 2000;
  const MAX_BUFFERED = 1 << 20; // bytes that may wait in the socket: half a minute of speech

  let running = null; // {stop()} of the transcription in progress

  // ------------------------------------------------------------ what is shown

  const status = (text) => { $("status").textContent = text; };
  const complain = (text) => { $("error").textContent = text; };
  const seconds = (value) => value.toFixed(1) + " s";

  function line() {
    const item = document.createElement("li");
    const text = item.appendChild(document.createElement("span"));
    const note = item.appendChild(document.createElement("small"));
    $("text").append(item);
    item.scrollIntoView({ block: "nearest" });
    return {
      show(value, { partial = false } = {}) {
        text.textContent = value;
        text.className = partial ? "partial" : "";
      },
      note(value) { note.textContent = value; },
      remove() { item.remove(); },
    };
  }

  function begin(job) {
    running = job;
    complain("");
    for (const id of ["talk", "file", "key", "language"]) $(id).disabled = job !== null;
    $("stop").disabled = job === null;
    $("talk").setAttribute("aria-pressed", String(job !== null && job.live === true));
  }

  function end(text) {
    const error = $("error").textContent;
    begin(null);
    complain(error);
    status(text);
    poll();
  }

  // ------------------------------------------------------------ talking to the server

  const key = () => $("key").value.trim();
  const headers = () => (key() ? { authorization: "Bearer " + key() } : {});

  async function reason(response) {
    try {
      return (await response.json()).error.message;
    } catch {
      return "The server answered " + response.status + ".";
    }
  }

  async function* serverSentEvents(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const text of lines) {
        if (text.startsWith(": ")) status(text.slice(2));
        if (text.startsWith("data: {")) yield JSON.parse(text.slice(6));
      }
    }
  }

  // ------------------------------------------------------------ a recording

  async function transcribe(file) {
    const abort = new AbortController();
    begin({ stop: () => abort.abort() });
    const out = line();
    const began = performance.now();
    const since = () => (performance.now() - began) / 1000;
    let text = "";
    let first = null;
    out.note(file.name);
    status("sending");
    try {
      const form = new FormData();
      form.append("stream", "true");
      if ($("language").value.trim()) form.append("language", $("language").value.trim());
      form.append("file", file, file.name);
      const response = await fetch("v1/audio/transcriptions", {
        method: "POST", body: form, headers: headers(), signal: abort.signal,
      });
      if (!response.ok) throw new Error(await reason(response));
      for await (const event of serverSentEvents(response.body)) {
        if (event.error) throw new Error(event.error.message);
        if (event.type === "transcript.text.delta") {
          first ??= since();
          text += event.delta;
          out.show(text, { partial: true });
        } else if (event.type === "transcript.text.done") {
          text = event.text;
          out.show(text || "(no speech)");
          const length = event.usage?.seconds ? seconds(event.usage.seconds) + " of audio, " : "";
          out.note(`${file.name}: ${length}first words after ${seconds(first ?? since())}, all after ${seconds(since())}`);
        }
      }
      end("done");
    } catch (error) {
      if (text) out.show(text);
      else out.remove();
      if (error.name !== "AbortError") complain(error.message);
      end(error.name === "AbortError" ? "stopped" : "failed");
    }
  }

  // ------------------------------------------------------------ the microphone

  async function microphone() {
    if (!navigator.mediaDevices) throw new Error("A browser gives the microphone only to https:// and localhost.");
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    let context = new AudioContext({ sampleRate: SAMPLE_RATE });
    let source;
    try {
      source = context.createMediaStreamSource(stream);
    } catch { // Firefox does not resample here; the server does
      await context.close();
      context = new AudioContext();
      source = context.createMediaStreamSource(stream);
    }
    await context.audioWorklet.addModule("console.js");
    const samples = new AudioWorkletNode(context, "samples", { numberOfOutputs: 0 });
    source.connect(samples);
    return {
      rate: context.sampleRate,
      port: samples.port,
      close() {
        samples.port.onmessage = null;
        for (const track of stream.getTracks()) track.stop();
        if (context.state !== "closed") context.close();
      },
    };
  }

  function connect(rate) {
    const url = new URL("v1/stream", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("sample_rate", rate);
    if ($("language").value.trim()) url.searchParams.set("language", $("language").value.trim());
    const protocols = ["napscribe"];
    if (key()) protocols.push("openai-insecure-api-key." + key());
    return new WebSocket(url, protocols);
  }

  async function talk() {
    begin({ live: true, stop() {} });
    status("waiting for the microphone");
    let microphoneInUse;
    let socket;
    try {
      microphoneInUse = await microphone();
      socket = connect(microphoneInUse.rate);
    } catch (error) {
      microphoneInUse?.close();
      complain(error.name === "SyntaxError" ? "This key has letters that a browser cannot send here." : error.message);
      end("failed");
      return;
    }
    const waiting = []; // frames spoken before the line is open
    const started = new Map(); // utterance -> when its speech was noticed
    const lines = new Map(); // utterance -> its line
    const lineOf = (number) => {
      if (!lines.has(number)) lines.set(number, line());
      return lines.get(number);
    };
    let clean = false;
    running.stop = () => {
      microphoneInUse.close();
      status("finishing");
      if (socket.readyState === WebSocket.OPEN) socket.send('{"type":"close"}');
      else socket.close();
    };
    microphoneInUse.port.onmessage = ({ data }) => {
      if (socket.readyState === WebSocket.CONNECTING) waiting.push(data);
      else if (socket.readyState === WebSocket.OPEN && socket.bufferedAmount < MAX_BUFFERED) socket.send(data);
    };
    socket.onopen = () => {
      for (const frame of waiting.splice(0)) socket.send(frame);
      status("listening");
    };
    socket.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      switch (event.type) {
        case "speech_started":
          started.set(event.utterance, performance.now());
          status("hearing you");
          break;
        case "partial": {
          const out = lineOf(event.utterance);
          out.show(event.text, { partial: true });
          if (started.has(event.utterance)) {
            out.note(`first words after ${Math.round(performance.now() - started.get(event.utterance))} ms`);
            started.delete(event.utterance);
          }
          break;
        }
        case "speech_stopped":
          status("listening");
          break;
        case "final":
          if (event.text) {
            const { speech_end_to_final: total, endpoint } = event.timings;
            const latency = total === null ? "" : `, ${Math.round(total)} ms after the last sound (${Math.round(endpoint)} ms of them silence)`;
            lineOf(event.utterance).show(event.text);
            lineOf(event.utterance).note(`${seconds(event.start)} to ${seconds(event.end)}${latency}`);
          } else {
            lines.get(event.utterance)?.remove();
          }
          lines.delete(event.utterance);
          break;
        case "done":
          clean = true;
          break;
        case "error":
          complain([event.message, event.hint].filter(Boolean).join(" "));
          break;
      }
    };
    socket.onclose = () => {
      microphoneInUse.close();
      if (!clean && !$("error").textContent) {
        complain("The server refused or lost the line. Is the key right, and is there room for one more stream?");
      }
      end(clean ? "done" : "failed");
    };
  }

  // ------------------------------------------------------------ the state of the worker, only while somebody looks

  let timer = null;

  async function poll() {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      const response = await fetch("api/ps", { headers: headers() });
      show(response.ok ? await response.json() : null, response.ok ? "" : await reason(response));
    } catch {
      show(null, "The server does not answer.");
    }
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, POLL_MS);
  }

  function show(report, trouble) {
    const state = document.createElement("b");
    if (report === null) {
      $("state").replaceChildren(trouble);
      return;
    }
    const { worker } = report;
    const mib = (bytes) => Math.round(bytes / 2 ** 20) + " MiB";
    state.textContent = worker.state === "stopped" ? "asleep" : worker.state;
    const more = [];
    if (worker.starting) more.push(`${worker.starting.phase} ${Math.round(worker.starting.fraction * 100)} %`);
    if (worker.resident_bytes) more.push(mib(worker.resident_bytes));
    if (worker.device_bytes) more.push(mib(worker.device_bytes) + " on the GPU");
    if (worker.idle_in_seconds) more.push(`sleeps in ${Math.round(worker.idle_in_seconds)} s`);
    if (report.gateway_resident_bytes) more.push("gateway " + mib(report.gateway_resident_bytes));
    $("state").replaceChildren("worker ", state, more.length ? ", " + more.join(", ") : "");
    $("model").textContent = report.model;
  }

  // ------------------------------------------------------------ wiring

  const offer = (file) => {
    if (!file) return;
    if (running) complain("One at a time: stop what is running first.");
    else transcribe(file);
  };
  const drop = $("drop");
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) drop.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    offer(event.dataTransfer.files[0]);
  });
  $("file").addEventListener("change", (event) => {
    offer(event.target.files[0]);
    event.target.value = "";
  });
  $("talk").addEventListener("click", () => { if (!running) talk(); });
  $("stop").addEventListener("click", () => running?.stop());
  $("clear").addEventListener("click", () => {
    if (!running) $("text").replaceChildren();
  });
  $("copy").addEventListener("click", async () => {
    const said = [...document.querySelectorAll("#text span")].map((item) => item.textContent).join("\n");
    await navigator.clipboard?.writeText(said);
    status("copied");
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("key").value = sessionStorage.getItem("key") ?? ""; // forgotten with the tab
  $("key").addEventListener("change", () => {
    sessionStorage.setItem("key", key());
    poll();
  });
  document.addEventListener("visibilitychange", poll);
  poll();
}
