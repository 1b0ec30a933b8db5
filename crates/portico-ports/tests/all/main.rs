//! The model against the tables it comes from, and the documentation against the model.

mod cloud;
mod docs;
mod tables;
