//! The parts of an HTTP/2 connection that do not depend on the content of its streams. They serve
//! Konnectivity, whose streams hold gRPC messages or the bytes of a connection.
//!
//! The task of a connection owns a [`Turn`] and polls h2 through it. [`Activity`] is shared with the tasks of
//! its streams, and [`RoomTurn`] bounds the bytes that wait for the peer. [`Bridge`] joins a stream with a
//! socket; [`read_chunk`] reads a socket as it does.

pub use crate::activity::{Activity, RoomTurn};
pub use crate::bridge::{Bridge, LEAVING};
pub use crate::cause::cause;
pub use crate::chunk::{CHUNK, read as read_chunk};
pub use crate::inbound::Inbound;
pub use crate::keepalive::KeepAlive;
pub use crate::settings::{
    FRAME_SIZE, HEADER_LIST, LATE_FRAMES, SEND_BUFFER, STREAM_WINDOW, connection_window,
};
pub use crate::turn::{Batched, Turn, batched};
pub use crate::waiting::Waiting;
