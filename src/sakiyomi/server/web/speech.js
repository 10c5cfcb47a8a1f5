// A speech model: a sound is chosen, dropped or recorded, and its segments are shown as they come.

const RATE = 16000;  // of speech models
let recorder = null;

// Whether the model takes sounds decides which parts of the page are there.
function listen() {
  const on = Boolean(card.audio);
  $("listen").hidden = !on;
  for (const name of ["ask", "panel", "shelf-toggle", "colours"]) $(name).hidden = on;
  if (on) shelf(false);
  document.querySelector(".skip").href = on ? "#sound-choose" : "#prompt";
  $("record").hidden = !navigator.mediaDevices?.getUserMedia || !window.MediaRecorder;  // they need https, or this machine
}

// What the browser can decode goes as WAV, so that the server need not read other kinds.
async function asWav(file) {
  let found;
  try { found = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer()); } catch { return file; }
  const channels = Array.from({length: found.numberOfChannels}, (_, i) => found.getChannelData(i));
  const view = new DataView(new ArrayBuffer(44 + 2 * found.length)), letters = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  letters(0, "RIFF");
  view.setUint32(4, 36 + 2 * found.length, true);
  letters(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) view.setUint16(at, value, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  letters(36, "data");
  view.setUint32(40, 2 * found.length, true);
  for (let i = 0; i < found.length; i++) {
    const mean = channels.reduce((sum, one) => sum + one[i], 0) / channels.length;
    view.setInt16(44 + 2 * i, Math.max(-32768, Math.min(32767, Math.round(32768 * mean))), true);
  }
  return new Blob([view], {type: "audio/wav"});
}

const stamp = (seconds, mark = ".", hours = false) => {
  const whole = Math.round(1000 * seconds), two = (value) => String(Math.floor(value)).padStart(2, "0");
  const ahead = hours || whole >= 3600000 ? `${two(whole / 3600000)}:` : "";
  return `${ahead}${two(whole / 60000 % 60)}:${two(whole / 1000 % 60)}${mark}${String(whole % 1000).padStart(3, "0")}`;
};
const WRITERS = {
  txt: (found) => found.map((one) => `${one.text.trim()}\n`).join(""),
  srt: (found) => found.map((one, i) => `${i + 1}\n${stamp(one.start, ",", true)} --> ${stamp(one.end, ",", true)}\n${one.text.trim()}\n\n`).join(""),
  vtt: (found) => `WEBVTT\n\n${found.map((one) => `${stamp(one.start)} --> ${stamp(one.end)}\n${one.text.trim()}\n\n`).join("")}`,
};

async function hear(file, name) {
  if (under) return;
  $("error").hidden = true;
  $("welcome").hidden = true;
  const box = make("div", "user", $("turns")), out = make("div", "reply", $("turns")), found = [];
  make("h2", "", box).textContent = name;
  const line = make("p", "note", out);
  say(line, "hearing");
  under = new AbortController();
  busy(true);
  try {
    const form = new FormData(), english = $("english").checked, spoken = $("spoken").value.trim();
    form.append("file", await asWav(file), name);
    form.append("response_format", "verbose_json");
    form.append("stream", "true");
    if (spoken && !english) form.append("language", spoken);
    const response = await ask(`/v1/audio/${english ? "translations" : "transcriptions"}`, {method: "POST", body: form, signal: under.signal});
    for await (const value of events(response)) {
      if (value.type === "transcript.text.segment") {
        found.push(value);
        const row = make("p", "");
        make("span", "note", row).textContent = `${stamp(value.start)} `;
        row.append(value.text.trim());
        line.before(row);
        $("end").scrollIntoView({block: "nearest"});
      } else if (value.type === "transcript.text.done") {
        say(line, found.length ? "heard" : "heardNothing", {seconds: value.duration, language: value.language ? `· ${value.language}` : ""});
        say($("status"), "done", {tokens: value.segments.reduce((sum, one) => sum + one.tokens.length, 0), text: value.text});
        break;
      }
    }
  } catch (error) {
    hush(line);
    if (error.name !== "AbortError") show(failed(error));
    if (!found.length) { box.remove(); out.remove(); }
  } finally {
    under = null;
    busy(false);
    if (found.length) {
      const acts = make("div", "acts", $("turns")), stem = name.replace(/\.[^.]*$/, "");
      for (const ending of Object.keys(WRITERS)) button(acts, "saveAs", () => download(`${stem}.${ending}`, "text/plain", WRITERS[ending](found)), {ending});
    }
    $("end").scrollIntoView({block: "nearest"});
  }
}
async function record() {
  if (recorder) { recorder.stop(); return; }
  let stream;
  try { stream = await navigator.mediaDevices.getUserMedia({audio: true}); } catch (error) { show(new Failure("eMicrophone", {}, error.message)); return; }
  const parts = [], began = new Date();
  recorder = new MediaRecorder(stream);
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  recorder.addEventListener("stop", () => {
    for (const track of stream.getTracks()) track.stop();
    const type = recorder.mimeType;
    recorder = null;
    say($("record"), "record");
    hear(new Blob(parts, {type}), `${began.toLocaleTimeString(language)}.${type.includes("mp4") ? "m4a" : "webm"}`);
  });
  recorder.start();
  say($("record"), "recordEnd");
}
$("record").addEventListener("click", record);
$("sound-choose").addEventListener("click", () => $("sound").click());
$("sound").addEventListener("change", async ({target}) => { for (const file of [...target.files]) await hear(file, file.name); target.value = ""; });
$("sound-stop").addEventListener("click", () => under?.abort());
$("listen").addEventListener("submit", (event) => event.preventDefault());
for (const place of ["talk", "listen"]) {
  $(place).addEventListener("dragover", (event) => { if (card?.audio) event.preventDefault(); });
  $(place).addEventListener("drop", async (event) => {
    if (!card?.audio) return;
    event.preventDefault();
    for (const file of [...event.dataTransfer.files]) await hear(file, file.name);
  });
}
