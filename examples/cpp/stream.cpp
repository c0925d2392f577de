// Stream an answer from the fleet: ./stream [ADDRESS] [PROMPT]
//
// Prints the text as it arrives, then the usage. A failure prints the status and, if the fleet sent
// google.rpc details, where to look: the message already names the field at fault.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include "inferfleet/v1/inference.grpc.pb.h"

namespace v1 = inferfleet::v1;

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:50051";
  const std::string prompt = argc > 2 ? argv[2] : "What is the capital of France?";

  auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  auto fleet = v1::Inference::NewStub(channel);

  grpc::ClientContext listing;
  v1::ListModelsResponse models;
  grpc::Status status = fleet->ListModels(&listing, v1::ListModelsRequest(), &models);
  if (!status.ok() || models.models_size() == 0) {
    std::cerr << "no model at " << address << ": " << status.error_message() << "\n";
    return 1;
  }

  v1::GenerateRequest request;
  request.set_model(models.models(0).name());
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(64);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> stream =
      fleet->Generate(&context, request);
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
    switch (event.event_case()) {
      case v1::GenerateResponse::kDelta:
        std::cout << event.delta().text() << std::flush;
        break;
      case v1::GenerateResponse::kSummary:
        std::cout << "\n[" << event.summary().usage().completion_tokens() << " tokens from "
                  << event.summary().engine_id() << "]\n";
        break;
      default:  // started, finished
        break;
    }
  }
  status = stream->Finish();
  if (!status.ok()) {
    std::cerr << "\nstatus " << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }
  return 0;
}
