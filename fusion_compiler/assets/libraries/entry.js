import dagre from "@dagrejs/dagre";
import { select } from "d3-selection";
import { zoom, zoomIdentity, zoomTransform } from "d3-zoom";
import hljs from "highlight.js/lib/core";
import python from "highlight.js/lib/languages/python";

hljs.registerLanguage("python", python);
export { dagre, hljs, select, zoom, zoomIdentity, zoomTransform };
