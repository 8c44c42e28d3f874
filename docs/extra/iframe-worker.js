/* A browser starts no worker for a page opened from a folder. There the search runs in a hidden
   frame instead; on a server this does nothing. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      const load = src => new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src, onload: done, onerror: failed })
        this.inside.document.body.appendChild(script)
      })
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve())
      this.inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => {
        const event = new MessageEvent("message", { data })
        this.inside.dispatchEvent(event)
      })
    }
    terminate() { this.inside.frameElement.remove() }
  }
}
