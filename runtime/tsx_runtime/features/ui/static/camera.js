// Takes a picture with the camera of this device.

import { h, show } from "./dom.js";

/** A button that opens the camera, and one that takes the picture and calls `taken(file)`. Null without a camera. `close()` turns the camera off. */
export function cameraButton(taken) {
  if (!navigator.mediaDevices?.getUserMedia) return null;
  let stream = null;
  const video = h("video", { class: "picture", muted: true, playsinline: true, "aria-label": "What the camera sees" });
  const shoot = h("button", { type: "button", class: "primary", onclick: () => take() }, "Take picture");
  const stop = h("button", { type: "button", onclick: () => close() }, "Close camera");
  const problem = h("p", { class: "problem", role: "alert" });
  const panel = h("div", { hidden: true }, video, h("div", { class: "row" }, shoot, stop));
  const open = h("button", { type: "button", onclick: async () => {
    problem.textContent = "";
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      problem.textContent = `The camera cannot be used: ${error.message}`;
      return;
    }
    if (!open.isConnected) return close(); // asked for, and then left
    video.srcObject = stream;
    shoot.disabled = true; // without a frame there is no picture
    show(panel, true);
    await video.play().catch(() => {}); // closed already
    shoot.disabled = false;
    show(open, false);
    shoot.focus();
  } }, "Use camera");
  const close = () => {
    for (const track of stream?.getTracks() ?? []) track.stop();
    stream = null;
    video.srcObject = null;
    show(panel, false);
    show(open, true);
    open.focus();
  };
  const take = () => {
    const canvas = h("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => {
      close();
      taken(new File([blob], "picture.jpg", { type: "image/jpeg" }));
    }, "image/jpeg", 0.92);
  };
  return { node: h("div", { class: "camera" }, open, panel, problem), close: () => stream && close() };
}
