//! CONNECT streams.
use crate::connection::Arrival;
use crate::worker::Worker;
use std::sync::Arc;
use tokio::net::TcpStream;
pub(crate) async fn serve_tunnel(_worker: Arc<Worker>, _stream: TcpStream, _arrival: Arrival) {}
