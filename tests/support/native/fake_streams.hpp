// The fake CUDA driver: the driver's functions for streams, events, capture and graphs. Part of fake_cuda.cpp.
#pragma once

#include "fake_driver.hpp"

// ---- streams and events

DRIVER cuStreamCreate(void **stream, unsigned flags) BODY({
    Context &context = current();
    check_given(stream && flags <= 1);
    *stream = pointer(add_stream(context, flags == 0, false, false));
})
DRIVER cuStreamDestroy_v2(void *handle) BODY({
    current();
    check_given(handle);
    Stream &stream = of_handle(state->streams, handle, "stream");
    if (stream.capture) state->invalidate(CAPTURE_UNSUPPORTED, "the stream is capturing", stream.capture);
    state->streams.erase(stream.handle);
})
DRIVER cuStreamSynchronize(void *handle) BODY({
    Stream &stream = stream_of(handle);
    if (stream.capture) state->invalidate(CAPTURE_UNSUPPORTED, "the stream is capturing", stream.capture);
    state->catch_up(stream);
    state->synchronize(stream);
    context_at(stream.context, "the stream's context"); // an operation may have failed
})
DRIVER cuEventCreate(void **event, unsigned flags) BODY({
    Context &context = current();
    check_given(event && flags < 8);
    *event = add(state->events, Event{{}, context.handle});
})
DRIVER cuEventDestroy_v2(void *event) BODY({
    current();
    erase(state->events, event, "event");
})
DRIVER cuEventRecord(void *handle, void *stream_handle) BODY({
    Event &event = of_handle(state->events, handle, "event");
    Stream &stream = stream_of(stream_handle);
    if (event.context != stream.context)
        refuse(INVALID_HANDLE, "the event and the stream belong to different contexts");
    if (stream.capture) State::check_capture(stream.capture);
    else state->catch_up(stream);
    static_cast<Place &>(event) = stream;
})
DRIVER cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) BODY({
    Stream &stream = stream_of(stream_handle);
    check_given(flags == 0);
    Event &event = of_handle(state->events, handle, "event");
    if (stream.capture) State::check_capture(stream.capture);
    if (!event.capture && !stream.capture) {
        state->catch_up(stream);
        stream.join(event);
        return SUCCESS;
    }
    if (!event.capture)
        state->invalidate(CAPTURE_ISOLATION, "a capturing stream waits for an event that was not captured",
                          stream.capture);
    if (!event.capture->is_active && stream.capture)
        state->invalidate(CAPTURE_ISOLATION, "a capturing stream waits for an event of an earlier capture",
                          stream.capture);
    if (!event.capture->is_active)
        refuse(CAPTURED_EVENT, "the event was last recorded in a capture that has ended");
    State::check_capture(event.capture);
    if (stream.is_legacy)
        state->invalidate(CAPTURE_IMPLICIT, "the default stream cannot be captured", event.capture);
    if (stream.capture && stream.capture != event.capture)
        state->invalidate(CAPTURE_MERGE, "two captures would be merged", [&](const Capture &each) {
            return &each == stream.capture.get() || &each == event.capture.get();
        });
    stream.capture = event.capture;
    stream.nodes.insert(event.nodes.begin(), event.nodes.end());
    return SUCCESS;
})

// ---- capture and graphs

DRIVER cuStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *, void **graph, const void **, size_t *) BODY({
    check_given(status && graph);
    const Stream &stream = stream_of(handle, false);
    *status = !stream.capture ? 0 : stream.capture->invalid.empty() ? 1 : 2;
    if (*status != 1) return;
    if (!stream.capture->graph) stream.capture->graph = new_handle();
    *graph = pointer(stream.capture->graph);
})
DRIVER cuThreadExchangeStreamCaptureMode(int *mode) BODY({
    check_given(mode && *mode >= 0 && *mode <= 2);
    std::swap(*mode, thread_mode);
})
DRIVER cuUserObjectCreate(void **object, void *owned, void (*release)(void *), unsigned count, unsigned flags) BODY({
    check_given(object && release && count == 1 && flags == 1);
    const uint64_t handle = new_handle();
    state->user_objects[handle].reset(new UserObject{owned, release});
    *object = pointer(handle);
})
DRIVER cuUserObjectRelease(void *object, unsigned count) BODY({
    check_given(count == 1);
    erase(state->user_objects, object, "user object");
})
DRIVER cuGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) BODY({
    check_given(count == 1 && flags == 1); // the caller's reference moves to the graph
    const auto is_it = [&](const auto &each) { return each->graph == reinterpret_cast<uint64_t>(graph); };
    const auto found = std::find_if(state->captures.begin(), state->captures.end(), is_it);
    if (found == state->captures.end()) refuse(INVALID_VALUE, "the graph is not one that is being captured");
    (*found)->objects.push_back(erase(state->user_objects, object, "user object"));
})
DRIVER cuStreamBeginCapture_v2(void *handle, int mode) BODY({
    check_given(mode >= 0 && mode <= 2);
    Stream &stream = stream_of(handle);
    if (stream.is_legacy) refuse(CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    if (stream.capture) refuse(ILLEGAL_STATE, "the stream is capturing");
    stream.capture =
        std::make_shared<Capture>(Capture{stream.handle, mode, std::this_thread::get_id(), {}, true, "", 0, {}});
    stream.nodes.clear();
    state->captures.push_back(stream.capture);
})
DRIVER cuStreamEndCapture(void *handle, void **graph) BODY({
    check_given(graph);
    *graph = nullptr;
    Stream &stream = stream_of(handle);
    const std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) refuse(ILLEGAL_STATE, "the stream is not capturing");
    if (capture->origin != stream.handle)
        state->invalidate(CAPTURE_UNMATCHED, "the capture did not begin in this stream", capture);
    if (capture->mode != 2 && capture->thread != std::this_thread::get_id())
        refuse(CAPTURE_WRONG_THREAD, "the capture began in another thread");
    std::set<int> joined = stream.nodes; // the nodes that the end of the stream depends on
    for (int k = static_cast<int>(capture->nodes.size()) - 1; k >= 0; k--) {
        const auto &predecessors = capture->nodes[static_cast<size_t>(k)].predecessors;
        if (joined.count(k)) joined.insert(predecessors.begin(), predecessors.end());
    }
    capture->is_active = false;
    for (auto &[other, each] : state->streams)
        if (each->capture == capture) each->capture = nullptr, each->nodes.clear();
    state->captures.erase(std::find(state->captures.begin(), state->captures.end(), capture));
    State::check_capture(capture);
    if (joined.size() < capture->nodes.size())
        refuse(CAPTURE_UNJOINED, "the stream does not wait for all captured work");
    const uint64_t made = capture->graph ? capture->graph : new_handle();
    state->graphs[made] = std::make_shared<Graph>(Graph{capture->nodes, std::move(capture->objects)});
    *graph = pointer(made);
})
DRIVER cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) BODY({
    current();
    check_given(exec && flags == 0);
    GraphExec made{{}, of_handle(state->graphs, graph, "graph"), {}};
    for (const Node &each : made.nodes)
        if (!made.chains.count(each.chain)) made.chains[each.chain] = {state->chains++, 0};
    *exec = add(state->execs, std::move(made));
})
DRIVER cuGraphLaunch(void *exec, void *handle) BODY({
    GraphExec &found = of_handle(state->execs, exec, "executable graph");
    Stream &stream = stream_of(handle);
    if (stream.capture)
        state->invalidate(NOT_SUPPORTED, "the fake driver cannot capture the launch of a graph", stream.capture);
    state->launch(found, stream);
})
DRIVER cuGraphExecDestroy(void *exec) BODY({ erase(state->execs, exec, "executable graph"); })
DRIVER cuGraphDestroy(void *graph) BODY({ erase(state->graphs, graph, "graph"); })
